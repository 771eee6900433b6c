"""Markdown pages and plots of runs, for Prefect and MLflow."""
