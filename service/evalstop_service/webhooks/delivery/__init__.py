"""HTTP out: the worker claims what is due, sends it signed, and settles it."""
