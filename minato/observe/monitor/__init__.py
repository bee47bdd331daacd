"""What the machine does meanwhile: cores, disks, memory, GPUs; and the Prometheus endpoint."""
