"""Counters, histograms and the epoch log: every stage writes them, reports read them."""
