"""Which sample runs where, and when: workers, their processes, and the window of batches in flight."""
