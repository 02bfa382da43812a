"""Metrics and logging of the service itself."""
