"""Drafters, each in a file or a folder of its own. A drafter proposes a `DraftTree` and knows nothing about acceptance."""
