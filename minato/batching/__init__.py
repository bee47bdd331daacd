"""Where batches are built: their layout, and the memory they are written to."""
