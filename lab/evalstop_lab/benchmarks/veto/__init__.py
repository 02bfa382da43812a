"""`make bench-veto`: whether vetoes are heard during faults (`cycles`) and floods."""
