"""How the flows reach a Prefect server: deployments and work pools."""
