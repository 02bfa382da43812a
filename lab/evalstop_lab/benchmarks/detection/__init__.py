"""`make bench-detection`: how well each detector and policy finds the turn, and what a step costs."""
