"""Results of a worker on their way into batches: it writes one, fills its place and publishes its batch in one act."""

from __future__ import annotations

import functools
import itertools
import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

from minato._compat import AsWorker
from minato._core import Packer, WorkerLedger, now_ns
from minato._core.codes import (
    END_BLOB,
    ERROR_BLOB,
    FIRST_COLLATED,
    MUST_COLLATE,
    SAMPLE_BLOB,
    SKIP_BLOB,
    TEXT_BLOB,
)
from minato._fork_safety import end_copy
from minato.batching.blobs import (
    AS_RAISED,
    BlobWriter,
    ErrorTransport,
    GetState,
    SampleError,
    Unsendable,
    raise_sample_error,
)
from minato.batching.collate import Collate, RunAgain
from minato.batching.layout import Layout, Rows, read_layout, share_layout
from minato.batching.sample_spec import Handover, are_plain
from minato.batching.serialization import DamagedError, Store, StoredIndices, damaged, listed
from minato.errors import SKIP, is_skip, not_the_end
from minato.observe.tracer import NULL_TRACER, Tracer


class _Fields(NamedTuple):
    """The fields of a batch: their arena offset, and the place of sample 0."""

    generation: int
    layout: Layout
    packer: Packer
    offset: int
    first: int
    num_samples: int


class _NothingLeftError(Exception):
    """All samples of a batch were skipped."""


class BatchWriter:
    """Delivers samples, errors and collated batches of one worker.

    A sample that fits the batch's layout is copied into the fields, once. Any other sample goes to the store as an
    object; then the worker that completes the batch collates it by torch's rules. The worker that fills the last place
    of a batch publishes it: the ledger does so by itself where all samples are in the fields, or a collated result was
    set before.

    Args:
        run_again: Runs samples that do not arrive here as they are; None: this process runs no samples.
        handover: What is known of samples that go from one worker to another; None: they go as they are.
        skips: Whether samples may be skipped: then SKIP stands for one.

    Attributes:
        indices: The indices, or the names, of the samples in flight.
        state: Returns the state of the worker's dataset, which goes with each batch; None: there is none.
        collates: Whether batches are built by calling ``collate_fn`` instead of in fields.
        has_texts: Whether the last samples were texts, which have no fields: a list of them is stored at once.
        handover_ns: What it takes to store one sample for the worker that collates its batch; 0: not measured yet.
    """

    state: GetState | None = None

    def __init__(
        self,
        ledger: WorkerLedger,
        store: Store,
        collate: Collate,
        *,
        errors: ErrorTransport = AS_RAISED,
        run_again: RunAgain | None = None,
        handover: Handover | None = None,
        skips: bool = False,
        tracer: Tracer = NULL_TRACER,
    ) -> None:
        self.collates = collate.is_own
        self.has_texts = False
        self.handover_ns = 0.0
        self._ledger, self._store = ledger, store
        self._segment = store.segment
        self._handover, self._skips, self._tracer = handover, skips, tracer
        self._blobs = BlobWriter(ledger, store, errors)
        self._collate_fn = collate
        self._run_again = run_again
        self._owner = os.getpid()
        self.indices = StoredIndices(ledger, store)
        self._open: dict[int, _Fields] = {}
        self._unsent: dict[tuple[int, int, int], Any] = {}  # by batch, generation and place
        self._last: Layout | None = None

    @property
    def keeps_batches(self) -> bool:
        """Whether the worker that runs the samples of a batch must collate them: then it claims whole batches."""
        return self._handover is not None and self._handover.keeps_batches

    # ---- results of samples

    def deliver(
        self,
        batch: int,
        k: int,
        indices: Sequence[object],
        samples: list[object],
        error: BaseException | None = None,
        *,
        whole: bool = False,
    ) -> None:
        """Deliver samples k, k+1, … of a batch to their own places, and the ``error`` of the one after these.

        ``indices`` are also those of samples that were not run because of that. ``whole``: they are all of the batch;
        those that do not fit its fields are collated at once.
        """
        if error is not None:
            # As with torch, the samples after a bad one are not run. The place of the error is filled before the
            # others, which then need no data.
            failed = len(samples)
            place = self._ledger.describe(batch).first + k + failed
            name = self.indices.name(indices[failed])
            self._blobs.attach_error(batch, place, error, name, self.state)
            self._fill(batch, k + failed, 1)
            self._fill_all(batch, k, samples)
            if rest := len(indices) - failed - 1:
                self._fill(batch, k + failed + 1, rest)
            return
        count = len(samples)  # collate_fn may change its list
        has_skipped = self._skips and any(map(is_skip, samples))
        in_one = whole and (self.collates or has_skipped or self.state is not None)
        if in_one:
            kept, skipped = samples, list[int]()
            if has_skipped:
                kept = [sample for sample in samples if sample is not SKIP]
                skipped = [i for i, sample in enumerate(samples) if sample is SKIP]
            if self.collates:
                self._note_types(kept)
            self._collate(batch, kept, skipped)
        if has_skipped:
            self._fill_all(batch, k, samples, None if in_one else indices)
            return
        if not in_one:
            self._write(batch, k, indices, samples, whole)
        self._fill(batch, k, count)

    def deliver_rows(self, position: int, rows: Rows) -> int:
        """Deliver rows, the first of which is at ``position`` in the ledger, to their own places, or to free ones.

        Returns how many are delivered. The others must be delivered one by one, which may also be faster.
        """
        ledger, done = self._ledger, 0
        while done < rows.size:
            place, batch, count = ledger.reserve(position + done, rows.size - done)
            k = place - ledger.describe(batch).first
            if not self._write_rows(batch, k, rows.part(done, count)):
                break
            self._collate_if_left(batch, ledger.fill(position + done, place, count))
            done += count
        return done

    def _write_rows(self, batch: int, k: int, rows: Rows) -> bool:
        """Copy rows to the places from number k of a batch on; False if they do not fit its fields."""
        start_ns = self._tracer.now()
        try:
            fields = self._fields(batch, rows.first)
        except (MemoryError, DamagedError):  # it comes again, with the first sample
            return False
        if fields is None or not fields.packer.fits(rows.first):
            return False
        fields.layout.gather(self._segment.array, fields.offset, fields.num_samples, k, rows)
        self._tracer.slice("copy", start_ns)
        return True

    def deliver_free(
        self,
        position: int,
        indices: Sequence[object],
        samples: list[object],
        error: BaseException | None = None,
        *,
        to_newest: bool = False,
        collates: bool = True,
    ) -> None:
        """Deliver samples, and the error of the one after them, to free places of any batch, together if these are.

        ``position`` is that of the first in the ledger. ``to_newest``: they go to the newest batch, where they have no
        places yet. A batch that is full then is collated here if ``collates``; otherwise another worker finds it.
        """
        ledger, done, count = self._ledger, 0, len(samples)
        has_skipped = self._skips and type(SKIP) in set(map(type, samples))
        while done < count or error is not None:
            taken = 1
            if error is not None and done == count:
                place, batch, _ = ledger.reserve(position + done, 1, to_newest)
                name = self.indices.name(indices[done])
                self._blobs.attach_error(batch, place, error, name, None)
                outcome, error = ledger.fill(position + done, place), None
            elif has_skipped and samples[done] is SKIP:
                batch, outcome = ledger.skip(position + done)
            else:
                most = 1 if has_skipped else count - done
                place, batch, taken = ledger.reserve(position + done, most, to_newest)
                record, end = ledger.describe(batch), done + taken
                run, whole = samples[done:end], taken == record.count
                self._write(batch, place - record.first, indices[done:end], run, whole)
                outcome = ledger.fill(position + done, place, taken)
            if collates:
                self._collate_if_left(batch, outcome)
            done += taken

    # ---- results of whole batches

    def deliver_list(
        self,
        batch: int,
        indices: Sequence[object],
        result: object,
        error: BaseException | None = None,
    ) -> None:
        """Deliver a whole batch that one call of the dataset has returned, which may be any object.

        A list of fewer samples is that of a reader that has ended: the last places belong to nothing.
        """
        record = self._ledger.describe(batch)
        count = record.count
        if error is not None:
            self._blobs.attach_error(batch, record.first, error, indices, self.state)
        elif self.state is not None:
            self._collate(batch, result)
        elif self.collates or type(result) is not list or len(result) != count:
            self._note_types(result)
            self._collate(batch, result)
        else:
            self._write(batch, 0, indices, result, whole=True)
        self._fill(batch, 0, count)

    def deliver_end(self, batch: int) -> None:
        """Deliver, in place of a batch, that its reader has ended before."""
        record = self._ledger.describe(batch)
        self._ledger.attach(record.first, END_BLOB, 0)
        self._fill(batch, 0, record.count)

    def collate_and_publish(self, batch: int) -> None:
        """Collate a full batch from the samples that its workers wrote, and publish it."""
        start_ns = self._tracer.now()
        offsets = [offset for _, offset, _ in self._ledger.blobs(batch).values()]
        gather = functools.partial(self._gather, batch)
        self._ledger.set_ready(batch, *self._collated(batch, gather))
        # Not before: after an interruption the batch is collated again from the same samples.
        for offset in offsets:
            self._store.drop(offset)
        self._tracer.slice("collate", start_ns)

    # ---- filling

    def _fill(self, batch: int, k: int, count: int) -> None:
        self._collate_if_left(batch, self._ledger.fill_run(batch, k, count))

    def _collate_if_left(self, batch: int, outcome: int) -> None:
        if outcome == MUST_COLLATE:
            self.collate_and_publish(batch)

    def _fill_all(
        self, batch: int, k: int, samples: list[object], indices: Sequence[object] | None = None
    ) -> None:
        """Fill the places of samples some of which are skipped, after writing the others unless ``indices`` is None."""
        position = self._ledger.describe(batch).first + k
        first = 0
        for skipped, piece in itertools.groupby(samples, is_skip):
            run = list(piece)
            end = first + len(run)
            if not skipped:
                if indices is not None:
                    self._write(batch, k + first, indices[first:end], run)
                self._fill(batch, k + first, len(run))
            for i in range(first, end) if skipped else ():
                self._collate_if_left(*self._ledger.skip(position + i))
            first = end

    # ---- writing; the caller then fills the places

    def _collate_rest(self, batch: int, k: int, samples: list[object]) -> bool:
        """Collate a batch that lacks samples k, k+1, … alone, which need no copy; False: it lacks others, or failed."""
        ledger, start_ns = self._ledger, self._tracer.now()
        if not (ledger.describe(batch).bound and ledger.lacks_only(batch, k, len(samples))):
            return False
        blobs = ledger.blobs(batch).values()
        if any(kind in (ERROR_BLOB, END_BLOB) for kind, _, _ in blobs):
            return False
        gather = functools.partial(self._gather, batch, k, samples)
        ledger.set_result(batch, *self._collated(batch, gather))
        for _, offset, _ in blobs:
            self._store.drop(offset)
        self._tracer.slice("collate", start_ns)
        return True

    def _collate(self, batch: int, samples: object, skipped: Sequence[int] = ()) -> None:
        """Collate a batch of which this worker has all samples, but the ``skipped`` ones.

        The result is set last. From then on the batch is complete, even if the worker dies.
        """
        start_ns, first = self._tracer.now(), self._ledger.describe(batch).first
        is_empty = bool(skipped) and not samples
        result = (SKIP_BLOB, 0) if is_empty else self._collated(batch, lambda: samples)
        if self.state is not None and not is_empty:
            k = next(k for k in itertools.count() if k not in skipped)
            self._blobs.attach_state(batch, first + k, self.state)
        for k in skipped:
            self._ledger.attach(first + k, SKIP_BLOB, 0)
        self._ledger.set_result(batch, *result)
        self._tracer.slice("collate", start_ns)

    def _write(
        self,
        batch: int,
        k: int,
        indices: Sequence[object],
        samples: list[object],
        whole: bool = False,
    ) -> None:
        """Write samples k, k+1, … of a batch, whose indices are for a worker that may have to run them again.

        ``whole``: they are all of the batch; those that have no place in its fields are collated at once.
        """
        start_ns = self._tracer.now()
        try:
            kind = type(samples[0])
            self.has_texts = kind is str or kind is bytes
            in_fields = not (self.collates or self.has_texts)
            fields = self._fields(batch, samples[0]) if in_fields else None
        except (MemoryError, DamagedError) as error:  # the batch does not fit its slot
            place = self._ledger.describe(batch).first + k
            self._blobs.attach_error(batch, place, error, None, None)
        else:
            if fields is None:
                if whole:
                    self._collate(batch, samples)
                elif not self._collate_rest(batch, k, samples):
                    begun_ns = now_ns()
                    self._attach(batch, k, indices, samples)
                    self._note_handover((now_ns() - begun_ns) / len(samples))
            else:
                address = self._segment.address + fields.offset
                texts = fields.packer.pack_run(samples, address, k)
                if texts is None and whole:
                    self._collate(batch, samples)
                elif texts is None:
                    self._pack_singly(batch, fields, k, indices, samples)
                elif texts:
                    self._blobs.attach(batch, fields.first + k, texts, TEXT_BLOB)
        self._tracer.slice("copy", start_ns)

    def _pack_singly(
        self,
        batch: int,
        fields: _Fields,
        k: int,
        indices: Sequence[object],
        samples: list[object],
    ) -> None:
        """Copy samples one by one: some do not fit the layout."""
        address = self._segment.address + fields.offset
        for i, sample in enumerate(samples):
            texts = fields.packer.pack(sample, address, k + i)
            if texts is None:
                self._attach(batch, k + i, indices[i : i + 1], [sample])
            elif texts:
                self._blobs.attach(batch, fields.first + k + i, texts, TEXT_BLOB)

    def _attach(self, batch: int, k: int, indices: Sequence[object], samples: list[object]) -> None:
        """Attach samples for the worker that collates their batch, or what has them run again there."""
        handover, attach = self._handover, self._blobs.attach_sample
        place = self._ledger.describe(batch).first + k
        sends = handover is None or are_plain(samples)
        sent = sends
        for i, sample in enumerate(samples):
            index = indices[i] if indices else None
            if not attach(batch, place + i, sample, index, sends):
                sent = False
                self._keep(batch, k + i, sample)
        if handover is not None and not sent:
            handover.settle(False)

    def _keep(self, batch: int, k: int, sample: object) -> None:
        """Keep a sample that cannot be sent, and not run again either: this worker may be the one that collates it."""
        if self._run_again is None:
            describe, kept = self._ledger.describe, self._unsent
            for each in [each for each in kept if describe(each[0]).generation != each[1]]:
                del kept[each]
            kept[batch, describe(batch).generation, k] = sample

    def _note_types(self, result: object) -> None:
        """Find out from the samples of a whole batch whether those of others may be handed over."""
        handover = self._handover
        if handover is not None and handover.answer is None and type(result) is list and result:
            handover.settle(are_plain(result))

    def _note_handover(self, cost_ns: float) -> None:
        known = self.handover_ns  # a process that had to wait for a core raises it little
        self.handover_ns = min(cost_ns, known + (cost_ns - known) / 16) if known else cost_ns

    # ---- collation

    def _collated(self, batch: int, gather: Callable[[], object]) -> tuple[int, int]:
        """Collate what ``gather`` returns; gives offset with kind, and bytes, of the batch, its error, or a skip."""
        # If this process dies now, the lease says that it collated this batch and ran no sample.
        lease = self._ledger.lease
        before = lease.state()
        lease.enter(FIRST_COLLATED - batch, now_ns())
        samples = explanation = None
        try:
            samples = gather()
            lease.enter(FIRST_COLLATED - batch, now_ns())  # some may have run again
            # ``default_collate`` takes shared memory in workers, which threads do not need.
            with self._bound(batch), AsWorker(None):
                result = self._collate_fn(samples)
            samples = None
            end_copy(self._owner, None)
            offset, nbytes = self._blobs.put(batch, result, SAMPLE_BLOB, "result")
            found = offset | SAMPLE_BLOB, nbytes
        except _NothingLeftError:
            found = SKIP_BLOB, 0
        except self._blobs.errors.kinds as raised:
            end_copy(self._owner, raised)
            error: BaseException = raised
            indices = self.indices.of(batch)
            name = f"the batch of {listed(indices)}"
            if isinstance(error, StopIteration):
                error = not_the_end(f"collate_fn, called for {name},", error)
            elif samples is not None:
                explanation = self._collate_fn.explain(error, samples, indices, name)
            failure = SampleError(self._blobs.errors.wrap(error, explanation or ""))
            offset, nbytes = self._blobs.put_error(batch, failure, ERROR_BLOB)
            found = offset | ERROR_BLOB, nbytes
        # Not after an exception that ends the worker: it was here.
        if before.position is None:
            lease.enter(before.step, before.started_ns)
        else:
            lease.begin(before.position, before.started_ns, before.step)
        return found

    def _gather(self, batch: int, first: int = 0, own: Sequence[object] = ()) -> list[Any]:
        """Return the samples of a batch that were not skipped, from the fields and the store.

        Args:
            own: Samples ``first``, ``first`` + 1, … of the batch, whose places are not filled.
        """
        segment, batch_record = self._store.segment, self._ledger.describe(batch)
        at, count = batch_record.layout, batch_record.count
        record = read_layout(segment, at) if at else None
        samples: list[Any] = []
        texts: Sequence[Any] = ()  # of the samples from number `began` on
        began = 0
        blobs = self._ledger.blobs(batch)
        for k in range(count):
            kind, offset, nbytes = blobs.get(k, (0, 0, 0))
            if first <= k < first + len(own):
                samples.append(own[k - first])
                continue
            if kind == SKIP_BLOB and not offset:
                continue
            value: Any = self._store.get(offset, nbytes, None, kind) if kind else None
            if kind == TEXT_BLOB:
                texts, began = value, k
            if kind != SAMPLE_BLOB:
                num_texts = 0 if record is None else record.layout.num_texts
                rest = texts[(k - began) * num_texts :]
                if record is None or len(rest) < num_texts:
                    raise damaged("what belongs to a sample")
                value = record.layout.sample(segment.array, record.fields, count, k, rest)
            samples += self._rerun(batch, k, value) if type(value) is Unsendable else [value]
        if not samples:
            raise _NothingLeftError
        return samples

    def _rerun(self, batch: int, k: int, sample: Unsendable) -> list[Any]:
        """The sample at a place of a full batch that does not arrive as it is: run again here, or kept here."""
        if self._run_again is not None:
            return self._run_again(batch, self._ledger.occupants(batch)[k], sample.index)
        key = batch, self._ledger.describe(batch).generation, k
        if key in self._unsent:
            return [self._unsent[key]]
        if sample.error is not None:
            raise_sample_error(sample.error)
        raise RuntimeError("the worker that could run a sample again has ended")

    def _bound(self, batch: int) -> AbstractContextManager[None]:
        """Bind randomness to a batch: its content depends neither on its worker nor on what that has run before."""
        bind = self._collate_fn.bind
        if bind is None:
            return nullcontext()
        record = self._ledger.describe(batch)
        (occurrence,) = self._ledger.occurrences(record.first, 1) or (0,)
        return bind(record.seed, record.epoch, self.indices.first(batch), occurrence)

    # ---- fields

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
            layout = Layout.infer(sample, self._last)
            if layout is None:
                return None
            self._last = layout
            record = share_layout(self._ledger, self._segment, batch, count, layout)
        packer = record.layout.packer(count)
        fields = _Fields(generation, record.layout, packer, record.fields, now.first, count)
        self._open[batch] = fields
        return fields
