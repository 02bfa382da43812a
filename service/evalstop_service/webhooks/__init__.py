"""Webhooks: endpoints, events and the channels that deliver them."""
