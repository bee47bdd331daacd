"""How batches reach the training loop."""
