"""DFlash and DSpark: a block of mask tokens beside the target's context (arXiv:2602.06036, arXiv:2607.05147)."""
