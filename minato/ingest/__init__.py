"""Writes a folder, a dataset or an iterable into a store that :mod:`minato.sources` reads."""

from minato.ingest.encoding import decoded
from minato.ingest.job import Ingested, IngestError, ingest
from minato.ingest.store import open_store

__all__ = ["IngestError", "Ingested", "decoded", "ingest", "open_store"]
