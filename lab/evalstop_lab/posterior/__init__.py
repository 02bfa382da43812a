"""The posterior detector: its prior, and the training of its network."""
