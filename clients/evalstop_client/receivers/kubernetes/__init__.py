"""Ends workloads of a Kubernetes cluster through its API."""
