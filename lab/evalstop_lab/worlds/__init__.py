"""Labeled runs, drawn and recorded, on which detectors are calibrated and evaluated."""
