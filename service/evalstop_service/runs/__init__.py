"""Runs: the roles of their metrics, their health and retention."""
