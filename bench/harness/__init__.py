"""What all benchmarks share: rows, datasets of known cost, loaders, checked runs, alternation, tables, charts."""
