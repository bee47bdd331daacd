"""The command ``minato``."""

from minato import _other_distribution  # noqa: F401  # minato/__init__.py may be another project's
