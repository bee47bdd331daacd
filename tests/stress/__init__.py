"""Programs that attack the core with kills, stops and load; tests run them, and so can you."""
