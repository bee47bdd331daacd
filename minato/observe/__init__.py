"""Statistics, traces, reports and metrics of a loader."""
