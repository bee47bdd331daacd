"""One pool of workers for all ranks of a node: a server in local rank 0, clients in the other ranks."""
