"""Deployments, work pools and workers of the flows on a Prefect server."""
