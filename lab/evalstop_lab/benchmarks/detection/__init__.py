"""`make bench-detection`: how well detectors and policies find the turn, and the cost of a step."""
