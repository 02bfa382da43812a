"""Decisions: transitions, commands of people, reports of receivers, guards, deadlines and stale runs."""
