"""EvalStop."""
