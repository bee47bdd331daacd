"""Loaders on data that lies behind a slow network."""
