"""Stages of a run as Prefect tasks, and the doors to Prefect's artifacts and to MLflow."""
