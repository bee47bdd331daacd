"""Writes the lists of ``docs/reference/options.md`` from the docstrings of ``DataLoader`` and the groups of options.

The fields in ``minato/options.py`` say which values are possible.
"""

from __future__ import annotations

import inspect
import re
from dataclasses import fields
from pathlib import Path
from typing import NamedTuple

from minato.loader import DataLoader
from minato.options import GROUPS, WIDENED, Options

DOCS = Path(__file__).parent
PAGE = DOCS / "reference" / "options.md"
LINKS = {
    "Record.path": {"the order of the batches": "../how-to/order.md#repeat-a-run"},
    "Observe.stats": {"the report": "report.md"},
    "Observe.trace": {"the run moment by moment": "../how-to/trace.md"},
    "Observe.metrics": {"metrics for Prometheus": "metrics.md#prometheus"},
    "ErrorPolicy.on_worker_death": {"replaces it": "../how-to/debugging.md#a-worker-dies"},
    "StragglerPolicy.percentile": {"slow": "../how-to/slow-samples.md#say-what-is-slow"},
    "SharedPool.on_rank_death": {
        "when the process of one ends": "../how-to/ranks.md#when-a-rank-ends"
    },
    "Options.num_workers": {"follows the load": "../how-to/workers.md#let-minato-choose"},
    "Options.pin_memory": {"where the workers write it": "../how-to/gpu.md#pin_memory"},
    "Options.persistent_workers": {
        "begin the next epoch": "../how-to/slow-samples.md#begin-the-next-epoch-early"
    },
    "Options.order": {"Which samples a batch holds and when it is returned": "../how-to/order.md"},
    "Options.seed": {"follow from it": "../how-to/randomness.md"},
    "Options.device": {"are returned": "../how-to/gpu.md"},
    "Options.readers": {"sequential readers": "../explanation/readers.md"},
    "Readers.resume": {"continues from a loaded state": "../how-to/resume-streams.md"},
    "Readers.ranks": {"the readers are dealt": "../how-to/stream-ranks.md"},
    "Options.fetch_concurrency": {"reads at once": "../how-to/remote-data.md"},
    "Options.cache": {"Stores each sample": "../how-to/caches.md"},
    "Options.compat": {
        "bit for bit torch's": "../how-to/verify-a-migration.md",
        "seeded for each sample": "../how-to/randomness.md",
    },
    "Options.memory_budget": {"prefetched batches": "../how-to/memory.md"},
    "Options.workers": {
        "an actor in a Ray cluster": "../how-to/several-machines.md",
        "a node share": "../how-to/ranks.md",
    },
    "Options.errors": {"a sample raises": "../how-to/bad-samples.md"},
    "Options.stragglers": {"slow": "../how-to/slow-samples.md#say-what-is-slow"},
    "Options.observe": {
        "the report": "report.md",
        "trace": "../how-to/trace.md",
        "metrics": "metrics.md",
    },
    "Options.recording": {"the order of the batches": "../how-to/order.md#repeat-a-run"},
    "Options.snapshot_every_n_steps": {
        "keeps its state": "../how-to/resume.md#datasets-with-a-state"
    },
    "RayWorkers.actor_options": {"each actor": "../how-to/several-machines.md#what-an-actor-takes"},
}
"""Words of the meaning of a field that are links, with their targets, relative to ``docs/reference``."""
_LIST = re.compile(r"(<!-- fields of (\w+) -->\n).*?(?=\n<!-- end -->)", re.DOTALL)


class Documented(NamedTuple):
    """What a docstring says of a field, in Markdown."""

    meaning: str
    default: str


def documented(group: type) -> dict[str, Documented]:
    """The fields of a group, by the section of its docstring; of ``Options``, the arguments of ``DataLoader``."""
    text = inspect.getdoc(DataLoader if group is Options else group) or ""
    section = re.search(r"^(?:Args|Attributes):\n(.*?)(?=^\S|\Z)", text, re.DOTALL | re.MULTILINE)
    found = {}
    for name, said in re.findall(
        r"^    (\w+): (.*?)(?=^    \w|\Z)", section[1] if section else "", re.DOTALL | re.MULTILINE
    ):
        words = " ".join(said.split()).replace("``", "`")
        meaning, _, default = words.removesuffix(".").rpartition(" Default: ")
        found[name] = Documented(meaning, default)
    return found


def meaning(said: Documented, links: dict[str, str]) -> str:
    """The meaning of a field with its links."""
    text = said.meaning
    for words, target in links.items():
        if words not in text:
            raise ValueError(f"{text!r} has not the words {words!r}, which are to be a link")
        text = text.replace(words, f"[{words}]({target})", 1)
    return text


def definitions(name: str) -> str:
    """The definition list of a group of options, or of arguments of torch that take more values: ``torch``."""
    group = {each.__name__: each for each in (*GROUPS, Options)}.get(name, Options)
    shown = [each for each in fields(group) if "values" in each.metadata]
    if group is Options:
        shown = [each for each in shown if (each.name in WIDENED) == (name == "torch")]
    said = documented(group)
    parts = []
    for each in shown:
        text = meaning(said[each.name], LINKS.get(f"{group.__name__}.{each.name}", {}))
        values, default = each.metadata["values"], said[each.name].default
        default = default if default == "must be given" else f"default: {default}"
        parts.append(f"`{each.name}`: {values}; {default}\n: {text}\n")
    return "\n".join(parts)


def rewritten(text: str) -> str:
    """The page with its lists as the fields are now."""
    return _LIST.sub(lambda found: found[1] + definitions(found[2]), text)


if __name__ == "__main__":
    PAGE.write_text(rewritten(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
