"""What several test modules share: tiny models, calls, drafters that are known to be right or wrong, checkpoints."""
