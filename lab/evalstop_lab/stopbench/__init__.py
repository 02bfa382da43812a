"""StopBench: how well a rule that stops training runs does, on runs that everybody can draw again."""
