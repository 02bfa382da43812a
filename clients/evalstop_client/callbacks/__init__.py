"""Callbacks that report a run from inside a training framework: one module a framework, imported when it is used."""
