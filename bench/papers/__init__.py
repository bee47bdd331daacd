"""The experiments of papers about data loaders, as far as they need no GPU, on real input and with other baselines."""
