"""Run samples: workers in processes, threads or the main process, and their supervision."""
