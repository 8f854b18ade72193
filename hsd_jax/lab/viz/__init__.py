"""Pictures of a decode, round by round."""
