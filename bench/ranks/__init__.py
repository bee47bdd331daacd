"""Ranks of one node: a pool of workers for each of them against one for all."""
