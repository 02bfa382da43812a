"""What the posterior detector is made of: features of a run, and a network in whole numbers."""
