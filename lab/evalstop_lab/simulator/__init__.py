"""A cluster of GPUs in which jobs wait, run, are evaluated and stopped: what stopping saves, and when it does not."""
