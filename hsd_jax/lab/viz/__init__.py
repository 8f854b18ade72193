"""Pictures: of a decode, round by round, and of what was measured."""
