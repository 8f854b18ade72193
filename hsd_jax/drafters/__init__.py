"""Drafters, each in its own file or folder. A drafter proposes a `DraftTree` and knows nothing about acceptance."""
