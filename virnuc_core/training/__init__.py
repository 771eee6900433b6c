"""Training of heads: labelled records, their split, the fit, calibration and metrics."""
