"""Jobs of any other scheduler, controlled by the operator's commands."""
