"""Policies: detectors with thresholds, the monitor that runs them, and both as JSON."""
