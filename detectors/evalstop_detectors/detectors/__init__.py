"""Detectors, one a file; each opens with its source."""
