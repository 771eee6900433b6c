"""Stages of a run as Prefect tasks, and the interfaces to Prefect artifacts and MLflow."""
