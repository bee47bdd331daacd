"""Datasets over databases, object stores, file systems and Parquet files.

Each module needs the package that its first line names; ``minato`` itself imports none of them.
"""
