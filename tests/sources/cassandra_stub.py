"""A stub of a Cassandra node: as much of the native protocol, version 4, as the driver needs to read and write rows.

CQL is given to SQLite as it is, which understands the few statements that minato sends; nothing here behaves like a
cluster. ``python cassandra_stub.py PORT FOLDER USER PASSWORD [CERTIFICATE KEY]``
"""

from __future__ import annotations

import asyncio
import hashlib
import re
import sqlite3
import ssl
import struct
import sys
import uuid
from collections.abc import Callable
from typing import Any, NamedTuple

VERSION = 4
ERROR, READY, AUTHENTICATE, SUPPORTED, RESULT, AUTH_SUCCESS = 0x00, 0x02, 0x03, 0x06, 0x08, 0x10
STARTUP, OPTIONS, QUERY, PREPARE, EXECUTE, REGISTER, AUTH_RESPONSE = (1, 5, 7, 9, 10, 11, 15)
VOID, ROWS, PREPARED = 1, 2, 4
BAD_CREDENTIALS, INVALID, UNPREPARED = 0x0100, 0x2200, 0x2500
HEADER = struct.Struct(">BBhBi")


class Kind(NamedTuple):
    """A type of CQL: its number, and how a value is written and read."""

    number: int
    write: Callable[[Any], bytes]
    read: Callable[[bytes], Any]


def fixed(number: int, form: str) -> Kind:
    return Kind(
        number, lambda value: struct.pack(form, value), lambda data: struct.unpack(form, data)[0]
    )


KINDS = {
    "bigint": fixed(2, ">q"),
    "blob": Kind(3, bytes, bytes),
    "double": fixed(7, ">d"),
    "uuid": Kind(12, bytes, bytes),
    "text": Kind(13, str.encode, bytes.decode),
}
LOCAL = {
    "key": ("text", "local"),
    "cluster_name": ("text", "stub"),
    "data_center": ("text", "datacenter1"),
    "rack": ("text", "rack1"),
    "release_version": ("text", "4.0.0"),
    "partitioner": ("text", "org.apache.cassandra.dht.Murmur3Partitioner"),
    "host_id": ("uuid", uuid.UUID(int=1).bytes),
    "schema_version": ("uuid", uuid.UUID(int=2).bytes),
}


class Refused(Exception):
    """An error of the protocol: its code, a message, and what follows."""

    def __init__(self, code: int, message: str, more: bytes = b"") -> None:
        super().__init__(message)
        self.body = struct.pack(">i", code) + text(message) + more


def text(value: str) -> bytes:
    return struct.pack(">H", len(value.encode())) + value.encode()


def long_bytes(value: bytes | None) -> bytes:
    return struct.pack(">i", -1) if value is None else struct.pack(">i", len(value)) + value


def columns_of(names: list[tuple[str, str]]) -> bytes:
    """Names and types of columns, all of one table."""
    parts = [text(name) + struct.pack(">H", KINDS[kind].number) for name, kind in names]
    return text("stub") + text("stub") + b"".join(parts)


def rows(names: list[tuple[str, str]], found: list[Any]) -> bytes:
    cells = [
        long_bytes(None if value is None else KINDS[kind].write(value))
        for row in found
        for value, (_, kind) in zip(row, names, strict=True)
    ]
    head = struct.pack(">iii", ROWS, 1, len(names)) + columns_of(names)
    return head + struct.pack(">i", len(found)) + b"".join(cells)


class Node:
    """The rows, and the statements that were prepared since the node was started."""

    def __init__(self, folder: str, user: str, password: str) -> None:
        self.tables = sqlite3.connect(f"{folder}/rows.db", isolation_level=None)
        self.tables.execute("PRAGMA synchronous=OFF")
        self.login = f"\0{user}\0{password}".encode()
        self.prepared: dict[bytes, str] = {}

    def answer(self, opcode: int, body: bytes) -> tuple[int, bytes]:
        if opcode == OPTIONS:
            versions = text("CQL_VERSION") + b"\0\1" + text("3.4.5")
            return SUPPORTED, b"\0\2" + versions + text("COMPRESSION") + b"\0\0"
        if opcode == STARTUP:
            return AUTHENTICATE, text("org.apache.cassandra.auth.PasswordAuthenticator")
        if opcode == AUTH_RESPONSE:
            if body[4:] != self.login:
                raise Refused(BAD_CREDENTIALS, "Provided username and/or password are incorrect")
            return AUTH_SUCCESS, long_bytes(None)
        if opcode == REGISTER:
            return READY, b""
        try:
            if opcode == EXECUTE:
                return RESULT, self.execute(body)
            statement = body[4 : 4 + struct.unpack_from(">i", body)[0]].decode()
            return RESULT, self.prepare(statement) if opcode == PREPARE else self.run(statement)
        except sqlite3.Error as error:
            raise Refused(INVALID, str(error)) from None

    def execute(self, body: bytes) -> bytes:
        size = struct.unpack_from(">H", body)[0]
        name = body[2 : 2 + size]
        if name not in self.prepared:
            raise Refused(UNPREPARED, "not prepared", body[: 2 + size])
        return self.run(self.prepared[name], body[2 + size :])

    def kinds(self, statement: str) -> dict[str, str]:
        """Name and type of each column of the table that a statement is about."""
        found = re.search(r'(?:FROM|INTO) "?(\w+)"?\."?(\w+)"?', statement)
        assert found is not None, statement
        columns = self.tables.execute(f'PRAGMA table_info("{found[1]}.{found[2]}")').fetchall()
        if not columns:
            raise Refused(INVALID, f"unconfigured table {found[2]}")
        return {column[1]: column[2].lower() for column in columns}

    def sql(self, statement: str) -> str:
        """SQLite has no keyspaces: they become part of the table's name; and in brackets a name is never a string."""
        statement = re.sub(r'"(\w+)"\."(\w+)"', r'"\1.\2"', statement)
        statement = re.sub(r'"([\w.]+)"', r"[\1]", statement)
        return statement.replace("INSERT INTO", "INSERT OR REPLACE INTO")

    def bound(self, statement: str) -> list[tuple[str, str]]:
        """Name and type of what a statement's question marks stand for."""
        kinds = self.kinds(statement)
        inserted = re.search(r"INTO [^(]*\(([^)]*)\) VALUES", statement)
        names = re.findall(r'"(\w+)"', inserted[1]) if inserted else []
        names += re.findall(r'"(\w+)" = \?', statement)
        return [(name, kinds[name]) for name in names]

    def prepare(self, statement: str) -> bytes:
        self.tables.execute(f"EXPLAIN {self.sql(statement)}", (None,) * statement.count("?"))
        bound = self.bound(statement)
        name = hashlib.md5(statement.encode()).digest()
        self.prepared[name] = statement
        head = struct.pack(">iH", PREPARED, len(name)) + name
        # One column is the partition key, the first that is bound.
        asked = struct.pack(">iiiH", 1, len(bound), 1, 0) + columns_of(bound)
        return head + asked + struct.pack(">ii", 4, 0)  # the columns of the answer come with it

    def run(self, statement: str, parameters: bytes = b"") -> bytes:
        if "FROM system.local" in statement:
            columns = [(name, kind) for name, (kind, _) in LOCAL.items()]
            return rows(columns, [[value for _, value in LOCAL.values()]])
        if "FROM system.peers_v2" in statement:
            raise Refused(INVALID, "unconfigured table peers_v2")
        if "FROM system.peers" in statement:
            return rows([("peer", "text")], [])
        if statement.startswith("CREATE KEYSPACE"):
            return struct.pack(">i", VOID)
        values = self.values(statement, parameters) if parameters else []
        cursor = self.tables.execute(self.sql(statement), values)
        if cursor.description is None:
            return struct.pack(">i", VOID)
        kinds = self.kinds(statement)
        return rows([(name, kinds[name]) for name, *_ in cursor.description], cursor.fetchall())

    def values(self, statement: str, parameters: bytes) -> list[Any]:
        at, found = 5, []  # behind consistency, flags, and how many there are
        for _, kind in self.bound(statement):
            size = struct.unpack_from(">i", parameters, at)[0]
            at += 4
            found.append(None if size < 0 else KINDS[kind].read(parameters[at : at + size]))
            at += max(size, 0)
        return found


async def serve(node: Node, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while True:
            head = HEADER.unpack(await reader.readexactly(HEADER.size))
            _, _, stream, opcode, size = head
            body = await reader.readexactly(size)
            try:
                kind, answer = node.answer(opcode, body)
            except Refused as refusal:
                kind, answer = ERROR, refusal.body
            writer.write(HEADER.pack(0x80 | VERSION, 0, stream, kind, len(answer)) + answer)
            await writer.drain()
    except (asyncio.IncompleteReadError, ConnectionError):
        writer.close()


async def main(port: str, folder: str, user: str, password: str, *certificate: str) -> None:
    node = Node(folder, user, password)
    context = None
    if certificate:
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.load_cert_chain(*certificate)
    server = await asyncio.start_server(
        lambda reader, writer: serve(node, reader, writer), "127.0.0.1", int(port), ssl=context
    )
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
