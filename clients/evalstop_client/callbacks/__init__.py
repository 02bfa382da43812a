"""Callbacks that report a run from a training framework: one module per framework, imported on demand."""
