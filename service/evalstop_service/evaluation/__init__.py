"""Was it right? Cases, outcomes, figures, rollout stages and backtests."""
