"""Networks as pure functions of their weights: target, drafters, cache. Only this package imports flax.linen."""
