"""Evaluates checkpoints when the service requests it."""
