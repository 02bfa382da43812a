"""Middleware that every request passes before a route."""
