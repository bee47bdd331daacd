"""Cores, disks, memory and GPUs of the machine; and the Prometheus endpoint."""
