"""What it costs to measure samples while they are loaded."""
