"""One pool of workers for all ranks of a node."""
