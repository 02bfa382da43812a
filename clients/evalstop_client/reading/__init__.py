"""Reads results from the service, and decides: `Api`."""
