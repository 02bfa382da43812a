"""Runs: the roles of their metrics, their health, retention and downsampling."""
