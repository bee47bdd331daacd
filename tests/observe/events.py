"""Reading traces, and what every trace must be like."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

Event = dict[str, Any]


class Slice(NamedTuple):
    """Something that took its time in a track; times in ns."""

    begun: int
    ended: int
    name: str
    args: dict[str, Any]


def read(path: Path) -> list[Event]:
    """The events of a trace that need not be complete; each is well-formed."""
    text = path.read_text()
    assert text.startswith("[\n")
    assert text.endswith(",\n")
    events: list[Event] = json.loads(text[:-2] + "]")
    for event in events:
        check(event)
    spans = Counter((event["ph"], event["cat"], event["id"]) for event in events if "id" in event)
    assert set(spans.values()) <= {1}, "two spans share an id"
    return events


def check(event: Event) -> None:
    """An event has what its kind needs (the Trace Event Format), and nothing else."""
    own = {"M": "args", "X": "ts dur args", "i": "ts s", "C": "ts args"}
    own |= dict.fromkeys("be", "ts cat id args")
    assert event.keys() == {"ph", "pid", "tid", "name", *own[event["ph"]].split()}
    assert type(event["pid"]) is type(event["tid"]) is int
    assert isinstance(event["name"], str)
    assert event.get("ts", 1) > 0
    assert event.get("dur", 0) >= 0
    if event["ph"] == "M":
        assert event["name"] in ("process_name", "thread_name", "thread_sort_index")
    if event["ph"] == "C":
        assert all(type(value) is int for value in event["args"].values())


def tracks(events: list[Event]) -> dict[str, list[Slice]]:
    """The slices of each track, by its name, the outer ones first."""
    names = {
        event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"
    }
    found: dict[str, list[Slice]] = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            begun = round(1000 * event["ts"])
            ended = begun + round(1000 * event["dur"])
            found[names[event["tid"]]].append(Slice(begun, ended, event["name"], event["args"]))
    for slices in found.values():
        slices.sort(key=lambda each: (each.begun, -each.ended))
    return found


def nested(track: list[Slice]) -> Iterator[tuple[Slice, Slice | None]]:
    """Each slice of a track, with the one that it lies in."""
    around: list[Slice] = []
    for each in track:
        while around and around[-1].ended <= each.begun:
            around.pop()
        yield each, around[-1] if around else None
        around.append(each)


def check_nesting(events: list[Event]) -> None:
    """Of two slices of a track that overlap, one contains the other, and the file names the outer one first."""
    for track in tracks(events).values():
        for each, outer in nested(track):
            assert outer is None or each.ended <= outer.ended, (outer, each)


def samples(events: list[Event], name: str = "sample") -> Counter[tuple[int, Any]]:
    """How often each ``(epoch, index)`` has a slice of this name."""
    return Counter(
        (event["args"]["epoch"], event["args"]["index"])
        for event in events
        if event["ph"] == "X" and event["name"] == name
    )


def parents(track: list[Slice], name: str) -> list[str | None]:
    """In what each slice of this name lies."""
    return [outer and outer.name for each, outer in nested(track) if each.name == name]


def names(events: list[Event], kind: str = "X") -> Counter[str]:
    """How many events of a kind have each name."""
    return Counter(event["name"] for event in events if event["ph"] == kind)
