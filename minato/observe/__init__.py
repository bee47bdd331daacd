"""What a run did: statistics, traces, reports and metrics."""
