"""Jobs of any other scheduler, by commands that the operator names."""
