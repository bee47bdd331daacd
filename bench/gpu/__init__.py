"""Loaders in front of a GPU."""
