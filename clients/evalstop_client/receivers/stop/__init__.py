"""Carrying out one stop, whatever the scheduler: verified, remembered, proved, reported."""
