"""Writes the samples of one worker into batches: each to its place, with one copy."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from torch.utils.data import default_collate

from minato._core import Packer, WorkerLedger, now_ns
from minato._core.codes import MUST_COLLATE, TEXT_BLOB
from minato._core.segment import Segment
from minato.batching.blobs import BlobWriter, GetState, WriterSettings
from minato.batching.layout import Layout, LayoutRecord, read_layout, share_layout
from minato.batching.plain import are_plain
from minato.batching.publish import BatchPublisher, Bind, RunAgain
from minato.batching.serialization import DamagedError, Store
from minato.observe.tracer import NULL_TRACER, Tracer
from minato.scheduling.handover import Handover
from minato.workers.fetch import Rows

__all__ = ["BatchWriter", "WriterSettings"]


class _Fields(NamedTuple):
    """The fields of a batch that samples are packed into.

    Attributes:
        generation: Generation of the batch's record in the ledger.
        layout: Layout of the samples.
        packer: Copies a sample into the fields.
        offset: Arena offset of the fields, in bytes.
        num_samples: Number of samples that the fields are for.
    """

    generation: int
    layout: Layout
    packer: Packer
    offset: int
    num_samples: int


class BatchWriter:
    """Writes samples, errors and collated batches of one worker.

    A sample that fits the batch's layout is copied into the fields, once. Any other sample goes to the store as an
    object; then the worker that completes the batch collates it by torch's rules.

    Args:
        settings: Settings of the worker's writer.
        ledger: The worker's end: holds the batches.
        segment: Memory of the arena.
        store: Holds objects.
        handover: What is known of samples that go from one worker to another; None: they go as they are.
        tracer: Records copies and collations.

    Attributes:
        collates: Whether batches are built by calling ``collate_fn`` instead of in fields.
        handover_ns: What it takes to store one sample for the worker that collates its batch; 0: not measured yet.
    """

    def __init__(
        self,
        settings: WriterSettings,
        *,
        ledger: WorkerLedger,
        segment: Segment,
        store: Store,
        handover: Handover | None = None,
        tracer: Tracer = NULL_TRACER,
    ) -> None:
        self.collates = settings.collate_fn is not default_collate or not settings.auto_collation
        self.handover_ns = 0.0
        self._ledger = ledger
        self._segment = segment
        self._tracer = tracer
        self._handover = handover
        self._blobs = BlobWriter(settings, ledger, store)
        self._publisher = BatchPublisher(
            settings,
            ledger=ledger,
            segment=segment,
            store=store,
            blobs=self._blobs,
            tracer=tracer,
        )
        self._open: dict[int, _Fields] = {}
        self._last: Layout | None = None

    @property
    def keeps_batches(self) -> bool:
        """Whether the worker that runs the samples of a batch must collate them: then it claims whole batches."""
        return self._handover is not None and self._handover.keeps_batches

    def note_types(self, samples: list[Any]) -> None:
        """Find out from the samples of a whole batch whether those of others may be handed over."""
        handover = self._handover
        if handover is not None and handover.answer is None:
            handover.settle(are_plain(samples))

    @property
    def bind(self) -> Bind:
        """Function that binds randomness to a batch while its samples are collated; the worker sets it."""
        return self._publisher.bind

    @bind.setter
    def bind(self, bind: Bind) -> None:
        self._publisher.bind = bind

    @property
    def run_again(self) -> RunAgain:
        """Function that runs samples again which could not be pickled; the worker sets it."""
        return self._publisher.run_again

    @run_again.setter
    def run_again(self, run_again: RunAgain) -> None:
        self._publisher.run_again = run_again

    def write_run(
        self,
        batch: int,
        k: int,
        place: int,
        samples: list[Any],
        indices: Sequence[Any] = (),
        whole: bool = False,
    ) -> None:
        """Write samples k, k + 1, … of a batch, whose places follow one another from ``place`` on.

        The caller then fills the places.

        Args:
            indices: Theirs; of use only where another worker may have to run them again.
            whole: They are all samples of the batch: those that have no place in its fields are collated at once.
        """
        start_ns = self._tracer.now()
        try:
            fields = None if self.collates else self._fields(batch, samples[0])
        except (MemoryError, DamagedError) as error:  # the batch does not fit its slot
            self.write_error(batch, place, error, None)
        else:
            if fields is None and whole:
                self._publisher.set_collated(batch, samples)
            elif fields is None:
                begun_ns = now_ns()
                self._attach(batch, place, samples, indices)
                self._note_handover((now_ns() - begun_ns) / len(samples))
            elif len(samples) == 1 or not self._pack_run(fields, k, samples):
                address = self._segment.address + fields.offset
                for i, sample in enumerate(samples):
                    texts = fields.packer.pack(sample, address, k + i)
                    if texts is None and whole:
                        self._publisher.set_collated(batch, samples)
                        break
                    if texts is None:
                        self._attach(batch, place + i, [sample], indices[i : i + 1])
                    elif texts:
                        self._blobs.attach(batch, place + i, texts, TEXT_BLOB)
        self._tracer.slice("copy", start_ns)

    def write_rows(self, batch: int, k: int, rows: Rows) -> bool:
        """Copy rows to the places from sample k of a batch on; the caller then fills the places.

        Returns:
            False if the samples must be written one by one, which may also be faster.
        """
        start_ns = self._tracer.now()
        try:
            fields = self._fields(batch, rows.first)
        except (MemoryError, DamagedError):  # it comes again, with the first sample
            return False
        if fields is None or not fields.packer.fits(rows.first):
            return False
        _, layout, _, offset, count = fields
        layout.gather(self._segment.array, offset, count, k, rows)
        self._tracer.slice("copy", start_ns)
        return True

    def write_batch(
        self, batch: int, samples: list[Any], state: tuple[int, GetState] | None = None
    ) -> None:
        """Write a whole batch that has one place for any number of samples; the caller then fills the place.

        Args:
            state: As for :meth:`write_collated`.
        """
        start_ns, packed = self._tracer.now(), False
        if not self.collates:
            layout = self._infer(samples[0])
            with suppress(
                MemoryError
            ):  # the collated batch does not fit either, and becomes an error
                if layout is not None and self._pack_all(batch, layout, samples):
                    if state is not None:
                        self._blobs.attach_state(batch, *state)
                    packed = True
        if not packed:
            self._publisher.set_collated(
                batch, samples, state=state, name="a batch of the iterable dataset"
            )
        self._tracer.slice("copy", start_ns)

    def write_end(self, batch: int, place: int, state: GetState | None) -> None:
        """Write at a batch's one place that the worker has no more data.

        Args:
            state: Returns the state of the worker's dataset; None without one.
        """
        self._blobs.attach_end(batch, place, state)

    def write_error(
        self,
        batch: int,
        place: int,
        error: BaseException,
        index: object,
        state: GetState | None = None,
    ) -> None:
        """Write the exception of a sample at its place; the caller then fills the place.

        Args:
            index: The sample's index in the dataset; None for a batch.
            state: Returns the state of the worker's dataset; None without one.
        """
        self._blobs.attach_error(batch, place, error, index, state)

    def write_collated(
        self,
        batch: int,
        samples: list[Any],
        skipped: Sequence[int] = (),
        state: tuple[int, GetState] | None = None,
    ) -> None:
        """Collate a batch of which this worker has all samples (see :meth:`BatchPublisher.set_collated`)."""
        self._publisher.set_collated(batch, samples, skipped=skipped, state=state)

    def write_skipped(self, batch: int, skipped: Sequence[int]) -> None:
        """Write that all samples of a batch are skipped; the caller then fills their places, ``skipped``."""
        self._publisher.set_skipped(batch, skipped)

    def publish_if_full(self, batch: int, outcome: int) -> None:
        """Publish a batch that ``fill`` or ``fill_run`` of the ledger left to this worker.

        Args:
            outcome: Their answer.
        """
        if outcome == MUST_COLLATE:
            self._publisher.publish_collated(batch)

    def publish_collated(self, batch: int) -> None:
        """Collate a full batch that another worker left, and publish it."""
        self._publisher.publish_collated(batch)

    def _attach(self, batch: int, place: int, samples: list[Any], indices: Sequence[Any]) -> None:
        """Attach samples for the worker that collates their batch, or what has them run again there."""
        handover, attach = self._handover, self._blobs.attach_sample
        sends = handover is None or are_plain(samples)
        sent = sends
        for i, sample in enumerate(samples):
            index = indices[i] if indices else None
            sent = attach(batch, place + i, sample, index, sends) and sent
        if handover is not None and not sent:
            handover.settle(False)

    def _note_handover(self, cost_ns: float) -> None:
        """Update the estimate; a process that had to wait for a core raises it little."""
        known = self.handover_ns
        self.handover_ns = min(cost_ns, known + (cost_ns - known) / 16) if known else cost_ns

    def _pack_all(self, batch: int, layout: Layout, samples: list[Any]) -> bool:
        count = len(samples)
        offset = self._ledger.allocate(batch, layout.fields_nbytes(count))
        fields = _Fields(0, layout, layout.packer(count), offset, count)
        if not self._pack_run(fields, 0, samples):
            return False
        # A worker that was interrupted here may have offered other fields before.
        record = LayoutRecord(offset, count, layout)
        return share_layout(self._ledger, self._segment, batch, record).fields == offset

    def _pack_run(self, fields: _Fields, k: int, samples: list[Any]) -> bool:
        """Copy samples to consecutive places; False if one does not fit the layout or holds strings."""
        return fields.packer.pack_run(samples, self._segment.address + fields.offset, k)

    def _fields(self, batch: int, sample: object) -> _Fields | None:
        """Return the fields of a batch; None if it has none yet and this sample has no layout."""
        now = self._ledger.describe(batch)
        generation, count = now.generation, now.count
        fields = self._open.get(batch)
        if fields is not None and fields.generation == generation:
            return fields
        if now.layout:
            record = read_layout(self._segment, now.layout)
        else:
            layout = self._infer(sample)
            if layout is None:
                return None
            offset = self._ledger.allocate(batch, layout.fields_nbytes(count))
            own = LayoutRecord(offset, count, layout)
            record = share_layout(self._ledger, self._segment, batch, own)
        packer = record.layout.packer(count)
        fields = _Fields(generation, record.layout, packer, record.fields, count)
        self._open[batch] = fields
        return fields

    def _infer(self, sample: object) -> Layout | None:
        layout = Layout.infer(sample, self._last)
        if layout is not None:
            self._last = layout
        return layout
