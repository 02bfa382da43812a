"""Decodes untrusted request bodies and streams into typed values, or refuses them."""
