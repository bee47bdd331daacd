"""What the machine does meanwhile, and an endpoint for those who collect figures."""
