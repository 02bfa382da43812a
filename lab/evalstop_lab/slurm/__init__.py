"""A real Slurm for tests: one node with fake GPUs, on free ports, in a folder of its own, gone with its block."""

from evalstop_lab.slurm.cluster import NoSlurm, SlurmCluster, slurm

__all__ = ["NoSlurm", "SlurmCluster", "slurm"]
