"""To whom batches go: the iterator, copies to a device, and several consumers."""
