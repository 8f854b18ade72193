"""Decodes to measure: the speeds of ways to decode, what drafts achieve on known texts, and choices made of both."""
