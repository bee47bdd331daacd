"""The wiring: the only package that imports every stage."""
