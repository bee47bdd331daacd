"""The transforms of a sample, and its random numbers."""
