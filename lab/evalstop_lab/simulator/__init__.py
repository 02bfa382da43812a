"""Simulates a GPU cluster in which jobs wait, run, are evaluated and stopped, to measure what stopping saves."""
