"""What a run did, moment by moment, in a file for https://ui.perfetto.dev."""
