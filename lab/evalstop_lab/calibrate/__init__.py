"""Thresholds that stop a chosen share of healthy runs: `evalstop-lab calibrate`."""
