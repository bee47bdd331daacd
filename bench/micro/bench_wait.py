"""A notification that nobody waits for, and a wait for what has happened already."""

from __future__ import annotations

from types import ModuleType

from bench.micro._twins import Operations, main


def operations(wait: ModuleType) -> Operations:
    gate = wait.Gate(bytearray(64), 0)
    names = {"gate": gate, "missed": wait.Gate(bytearray(b"\1" + bytes(63)), 0)}
    return {
        "notify, nobody asleep": ("gate.notify()", names),
        "wait for an event that has been": ("missed.wait(0, 1.0)", names),
    }


if __name__ == "__main__":
    main("wait", operations)
