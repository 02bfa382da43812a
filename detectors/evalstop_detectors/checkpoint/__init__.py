"""The best checkpoint among noisy scores, and where a finished run turned."""
