"""Decisions: their transitions, what people and receivers say of them, guards, deadlines and stale runs."""
