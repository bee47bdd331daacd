"""Benchmarks: ``bench.macro`` measures whole loaders, ``bench.micro`` the compiled core."""
