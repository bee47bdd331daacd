"""What the report costs, and whether its advice is worth following."""
