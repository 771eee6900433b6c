"""Benchmarks, each run as `python -m benchmarks.NAME`; results are in benchmarks/results/."""
