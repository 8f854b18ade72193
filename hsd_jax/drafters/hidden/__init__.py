"""Hidden-state drafting: states that read no drafted token, then token information (Lyanna, arXiv:2602.21224)."""
