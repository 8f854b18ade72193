"""Hidden-state drafting: K states that read no drafted token, and token information after the LM head (Lyanna,
arXiv:2602.21224).
"""
