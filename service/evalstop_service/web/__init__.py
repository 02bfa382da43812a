"""HTTP: our errors as answers, middleware, the API, MLflow's API and the dashboard."""
