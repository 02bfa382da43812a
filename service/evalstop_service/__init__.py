"""The EvalStop service: ingests metrics, decides, tracks the best checkpoint, delivers signed stop events."""
