"""Projects: their policies, keys and administration."""
