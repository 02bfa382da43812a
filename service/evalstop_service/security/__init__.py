"""Encryption of secrets, address policy, OpenID Connect and scopes."""
