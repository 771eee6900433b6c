"""Measurements, each run as `python -m benchmarks.NAME`; what they find is in benchmarks/results/."""
