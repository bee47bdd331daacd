"""A small real training run, once per loader: ``python -m demo``."""
