"""Several consumers of one loader: a part of ``DataLoader``."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch

from minato._support.loader_class import made_only
from minato.checks import check_device, check_whole
from minato.options import Options

if TYPE_CHECKING:
    from minato.delivery.consumers import Consumer

__all__ = ["Distribution"]


class Distribution:
    """Deals the batches of one loader out."""

    _options: Options

    @made_only
    def consumers(
        self, n: int | None = None, *, devices: Sequence[str | torch.device] | None = None
    ) -> tuple[Consumer, ...]:
        """Let several threads share this loader's epochs, its workers and its memory.

        Each batch goes to the consumer that has waited longest, so that all of them together get each index once per
        epoch. The loader itself is not to be iterated meanwhile.

        Args:
            n: How many consumers there are.
            devices: Or a device for each of them, where its batches go when it asks for them.

        Returns:
            The consumers; ``for batch in consumer`` is one epoch.

        Raises:
            ValueError, TypeError: The number or a device is not possible.
        """
        from minato.delivery.accelerator import memory_pinner
        from minato.delivery.consumers import Consumer, Group
        from minato.delivery.iterator import BatchIterator

        if (n is None) == (devices is None):
            raise ValueError(f"n={n} and devices={devices}: give one of the two")
        if self._options.target is not None:
            raise ValueError(
                f"device={str(self._options.device)!r} is one device for all: leave it out, and name one for each "
                "consumer by devices="
            )
        if devices is None:
            check_whole("n", n, 1)
            places: list[torch.device | None] = [None] * (n or 0)
        else:
            found = [check_device(device) for device in devices]
            places = [None if each is None or each.type == "cpu" else each for each in found]
            if not places:
                raise ValueError(f"devices={devices!r} is empty: give a device for each consumer")

        def open_epoch() -> Iterator[Any]:
            batches = iter(cast(Iterable[Any], self))
            if locker is not None and isinstance(batches, BatchIterator):
                batches.pin_slots(locker)
            return batches

        group = Group(open_epoch)
        consumers = tuple(Consumer(group, place) for place in places)
        locker = memory_pinner() if any(each.pins_memory for each in consumers) else None
        return consumers
