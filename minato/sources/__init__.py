"""Datasets whose samples lie elsewhere: in databases, object stores and Parquet files.

Each module needs the library that its first lines name; ``minato`` itself imports none of them.
"""
