"""Ends jobs of a Slurm cluster, with its commands or through slurmrestd."""
