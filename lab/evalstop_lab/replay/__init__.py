"""Past runs: read from logs, and judged by a policy as the service would have judged them."""
