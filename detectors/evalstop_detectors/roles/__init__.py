"""Which of a run's metrics are eval, proxy, KL and loss."""
