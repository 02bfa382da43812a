"""Metrics, tracing and logging of the service itself."""
