"""Which indices come, in which order: samplers, epochs, coverage and resumable state."""
