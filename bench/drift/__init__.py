"""A load that changes while it is loaded: what the loader makes of it, over time."""
