"""What stores of rows in a table have in common."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from minato.sources.ingest.store import Items, SourceStore
from minato.sources.sql import quoted, quoted_column

__all__ = ["TableStore"]


class TableStore(SourceStore):
    """Rows of a table, which is made if there is none; its columns are those of the first sample.

    A column that is None in the first sample has no type: where there is one, make the table yourself.
    """

    takes_rows = True
    types: ClassVar[Mapping[type, str]]
    """Of columns, by what is in them."""
    placeholder: ClassVar[str] = "?"

    def __init__(self, source: Any) -> None:
        super().__init__(source)
        self._table = quoted(source._table)
        self._column = quoted_column(source.key)

    def _definition(self, items: Items) -> str:
        """The statement that makes the table."""
        key, row = items[0]
        columns = [f"{self._column} {self.types[type(key)]} PRIMARY KEY"]
        columns += [
            f"{quoted_column(name)} {self.types.get(type(cell))}" for name, cell in row.items()
        ]
        return f"CREATE TABLE IF NOT EXISTS {self._table} ({', '.join(columns)})"

    def escaped(self, text: str) -> str:
        """A part of a statement with placeholders that holds none."""
        return text

    def _has_types(self, items: Items) -> bool:
        return all(type(cell) in self.types for cell in items[0][1].values())

    def _insertion(self, items: Items, verb: str = "INSERT") -> str:
        """The statement that writes a row of these columns, key first."""
        names = [self._column, *map(quoted_column, items[0][1])]
        marks = ", ".join([self.placeholder] * len(names))
        into = f"{verb} INTO {self._table} ({', '.join(names)}) VALUES"
        return f"{self.escaped(into)} ({marks})"

    def _rows(self, items: Items) -> list[tuple[Any, ...]]:
        """The values, all in the order of the first row's columns."""
        names = list(items[0][1])
        for key, row in items:
            if row.keys() != items[0][1].keys():
                raise ValueError(f"key {key!r} has the columns {list(row)}, and others {names}")
        return [(key, *(row[name] for name in names)) for key, row in items]
