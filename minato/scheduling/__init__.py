"""Which sample comes next: the dispatcher, orders, batches in flight and the prefetch window."""
