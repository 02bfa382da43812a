"""Evaluates checkpoints when the service asks for it."""
