"""The ledger's protocol as a model, and a checker that plays all its interleavings."""
