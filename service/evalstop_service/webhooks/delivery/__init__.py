"""Delivery of events: the worker, what it claims, and how it sends."""
