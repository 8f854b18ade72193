"""Pictures of a decode, round by round, and plots of measurements."""
