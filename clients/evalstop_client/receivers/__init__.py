"""Programs beside a scheduler that obey stop events and report back."""
