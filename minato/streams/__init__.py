"""Iterable datasets that anyone could write: they use what the loader offers to all, and know no other part of it."""
