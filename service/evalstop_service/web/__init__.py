"""HTTP: error responses, middleware, the API, MLflow's API and the dashboard."""
