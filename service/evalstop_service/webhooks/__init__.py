"""Webhooks: endpoints, events and the channels that they take."""
