"""Objects that keep a state, by torchdata's protocol."""

from __future__ import annotations

import inspect
from typing import Any

import torch

__all__ = ["is_stateful"]


def is_stateful(thing: Any) -> bool:
    """Whether an object has ``state_dict()``, which takes no arguments, and ``load_state_dict``.

    The weights of a module are not the state of its data, and a class has no state.
    """
    if isinstance(thing, (type, torch.nn.Module)):
        return False
    state_dict = getattr(thing, "state_dict", None)
    if not callable(state_dict) or not callable(getattr(thing, "load_state_dict", None)):
        return False
    try:
        inspect.signature(state_dict).bind()
    except TypeError:
        return False
    except ValueError:  # a compiled function does not say what it takes
        pass
    return True
