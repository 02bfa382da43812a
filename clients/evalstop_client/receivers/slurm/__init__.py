"""Ends jobs of a Slurm cluster, by its commands or through slurmrestd."""
