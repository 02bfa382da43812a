"""Whether decisions were right: cases, outcomes, figures, rollout stages and backtests."""
