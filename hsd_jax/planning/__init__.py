"""What a round costs and yields, and which way of decoding follows from it."""
