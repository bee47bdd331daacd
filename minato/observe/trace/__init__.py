"""Traces: the events of a run in a file for https://ui.perfetto.dev."""
