"""Whether a changing number of workers finds what the best fixed number gives."""
