"""Objects that keep a state, by torchdata's protocol."""

from __future__ import annotations

from typing import Any

__all__ = ["is_stateful"]


def is_stateful(thing: Any) -> bool:
    """Whether an object has ``state_dict`` and ``load_state_dict``."""
    return callable(getattr(thing, "state_dict", None)) and callable(
        getattr(thing, "load_state_dict", None)
    )
