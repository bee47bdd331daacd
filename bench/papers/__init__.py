"""The experiments of the MinatoLoader paper, as far as they need no GPU, on real input and with other baselines."""
