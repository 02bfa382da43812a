"""StopBench: evaluates rules that stop training runs, on reproducible runs."""
