"""Ends jobs of a Slurm cluster with its commands."""
