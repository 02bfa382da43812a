"""Reads results from the service and acts on decisions: `Api`."""
