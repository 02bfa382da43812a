"""The parts of the posterior detector: features of a run, and a network in integer arithmetic."""
