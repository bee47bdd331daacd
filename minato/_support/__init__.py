"""Helpers that several packages use; they know none of them."""
