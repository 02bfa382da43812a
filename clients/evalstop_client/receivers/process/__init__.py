"""Jobs that are children of the receiver."""
