"""Counters, histograms and the epoch log: the stages write them, the report reads them."""
