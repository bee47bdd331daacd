"""Writes a directory, a dataset or an iterable into a store that :mod:`minato.sources` reads."""

from minato.sources.ingest.encoding import decoded
from minato.sources.ingest.job import Ingested, IngestError, ingest
from minato.sources.ingest.urls import open_store

__all__ = ["IngestError", "Ingested", "decoded", "ingest", "open_store"]
