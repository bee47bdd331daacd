"""The command ``minato``."""
