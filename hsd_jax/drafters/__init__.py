"""Drafters, a room each: every one proposes a `DraftTree` and knows nothing about acceptance."""
