"""Measuring: modes timed in turns, rounds taken apart, ways to decode compared, the fastest found."""
