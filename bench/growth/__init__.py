"""How cost grows with the work: samples, workers, batch size and sample size; the start; and memory."""
