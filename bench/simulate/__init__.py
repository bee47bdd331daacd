"""Loaders in virtual time: the policies that schedule, over synthetic costs, at any scale."""
