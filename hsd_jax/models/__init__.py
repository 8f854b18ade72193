"""Networks as pure functions of their weights: target, drafters, cache; the only place that imports flax.linen."""
