"""Heads for other models: labelled records, their split, the fit, its calibration and its figures."""
