"""Keys of samples, and the words of a generator's state grown from a key.

``_seeding_py`` says which arguments each function takes, what it returns, and what it raises.
"""

cimport cython
from cpython.bytes cimport PyBytes_FromStringAndSize
from cpython.long cimport PyLong_AsUnsignedLongLongMask
from cpython.mem cimport PyMem_Calloc, PyMem_Free
from libc.stdint cimport int32_t, int64_t, uint32_t, uint64_t, uintptr_t
from libc.string cimport memcmp, memcpy


cdef extern from "seeding.h" nogil:
    uint64_t mn_spread(uint64_t seed)
    uint64_t mn_sample_key(uint64_t spread, uint64_t epoch, uint64_t index)
    void mn_fill(void *to, uint32_t words, uint64_t key, uint64_t stream, int width, int wide)
    bint mn_cpu_has_avx2()


__all__ = ["StateSnapshot", "StateWriter", "mix_seed", "sample_key", "spread_seed"]

cdef bint WIDE_VECTORS = mn_cpu_has_avx2()


def mix_seed(seed, epoch, index) -> int:
    """Return the 64-bit key of a sample; every input bit reaches every output bit.

    The inputs count modulo 2**64. For a given seed and epoch no two indices share a key.
    """
    return mn_sample_key(
        mn_spread(PyLong_AsUnsignedLongLongMask(seed)),
        PyLong_AsUnsignedLongLongMask(epoch),
        PyLong_AsUnsignedLongLongMask(index),
    )


def spread_seed(seed) -> int:
    """Return the int64 that stands for a seed in :func:`sample_key`; each of its bits depends on all of the seed."""
    return <int64_t>mn_spread(PyLong_AsUnsignedLongLongMask(seed))


def sample_key(spread, epoch, index) -> int:
    """Return the key of a sample, as :func:`mix_seed`, for a seed that is spread.

    It depends on the xor of seed and epoch: under another seed, an epoch with another number has the same keys.
    """
    return mn_sample_key(
        PyLong_AsUnsignedLongLongMask(spread),
        PyLong_AsUnsignedLongLongMask(epoch),
        PyLong_AsUnsignedLongLongMask(index),
    )


cdef int check_block(long words, int width) except -1:
    if width != 4 and width != 8:
        raise ValueError(f"width is 4 or 8 bytes, not {width}")
    if words < 0 or words > 0x7FFFFFFF:
        raise ValueError(f"words is between 0 and 2**31 - 1, not {words}")
    return 0


cdef struct Block:
    void *address
    uint32_t words
    int width
    uint64_t stream


cdef struct Cell:
    int32_t *address
    int32_t value


@cython.final
cdef class StateWriter:
    """Rewrites the states of several generators for one sample, in one call."""

    cdef Block *blocks
    cdef Cell *cells
    cdef Py_ssize_t block_count, cell_count
    cdef uint64_t seed

    def __cinit__(
        self,
        seed,
        list blocks,
        list cells,
    ):
        cdef Py_ssize_t i
        cdef uintptr_t where
        cdef long words
        self.seed = PyLong_AsUnsignedLongLongMask(seed)
        self.blocks = <Block *>PyMem_Calloc(len(blocks) + 1, sizeof(Block))
        self.cells = <Cell *>PyMem_Calloc(len(cells) + 1, sizeof(Cell))
        if self.blocks is NULL or self.cells is NULL:
            raise MemoryError
        for i, (address, length, stream, width) in enumerate(blocks):
            words = length
            check_block(words, width)
            where = address
            self.blocks[i] = Block(
                <void *>where, <uint32_t>words, width, PyLong_AsUnsignedLongLongMask(stream)
            )
        for i, (address, value) in enumerate(cells):
            where = address
            self.cells[i] = Cell(<int32_t *>where, value)
        self.block_count = len(blocks)
        self.cell_count = len(cells)

    def __dealloc__(self):
        PyMem_Free(self.blocks)
        PyMem_Free(self.cells)

    def write(self, epoch, index) -> None:
        """Fill every block from ``sample_key(seed, epoch, index)`` and set every cell."""
        cdef uint64_t key = mn_sample_key(
            self.seed,
            PyLong_AsUnsignedLongLongMask(epoch),
            PyLong_AsUnsignedLongLongMask(index),
        )
        cdef Py_ssize_t i
        cdef Block *block
        # Where there is a GIL it stays held: to other Python threads the new states appear all at once.
        for i in range(self.block_count):
            block = &self.blocks[i]
            mn_fill(
                block.address, block.words, key, block.stream, block.width, WIDE_VECTORS
            )
        for i in range(self.cell_count):
            self.cells[i].address[0] = self.cells[i].value


cdef enum:
    COMPARED_BYTES = 64  # at each end of a span


cdef struct Span:
    char *address
    Py_ssize_t nbytes


cdef inline bint differs(const char *copy, Span span) noexcept nogil:
    cdef Py_ssize_t head = min(span.nbytes, COMPARED_BYTES), tail = span.nbytes - head
    return memcmp(copy, span.address, head) != 0 or memcmp(copy + tail, span.address + tail, head) != 0


@cython.final
cdef class StateSnapshot:
    """A copy of the states of generators, to see whether anything in them changes."""

    cdef Span *spans
    cdef char *copy  # of all spans, one after the other
    cdef Py_ssize_t count
    cdef list parts
    cdef readonly list rests

    def __cinit__(self, list spans, rests=()):
        cdef Py_ssize_t i, total = 0, taken = 0
        cdef uintptr_t where
        self.spans = <Span *>PyMem_Calloc(len(spans) + 1, sizeof(Span))
        if self.spans is NULL:
            raise MemoryError
        for i, (address, nbytes) in enumerate(spans):
            where = address
            self.spans[i] = Span(<char *>where, nbytes)
            total += self.spans[i].nbytes
        self.copy = <char *>PyMem_Calloc(total + 1, 1)
        if self.copy is NULL:
            raise MemoryError
        self.count = len(spans)
        for span in self.spans[:self.count]:
            memcpy(self.copy + taken, span.address, span.nbytes)
            taken += span.nbytes
        self.parts = list(rests)
        self.rests = [part() for part in self.parts]

    def __dealloc__(self):
        PyMem_Free(self.spans)
        PyMem_Free(self.copy)

    def take(self) -> None:
        """Copy all parts as they are now."""
        cdef char *copy = self.copy
        for span in self.spans[:self.count]:
            if differs(copy, span):  # a copy of everything would empty the processor's cache of the samples
                memcpy(copy, span.address, span.nbytes)
            copy += span.nbytes
        if self.parts:
            self.rests = [part() for part in self.parts]

    def holds(self) -> bool:
        """Whether each part still is as it was when the copy was taken."""
        cdef const char *copy = self.copy
        for span in self.spans[:self.count]:
            if differs(copy, span):
                return False
            copy += span.nbytes
        return not self.parts or [part() for part in self.parts] == self.rests

    def restore(self) -> None:
        """Write all parts that have an address back as they were then."""
        cdef const char *copy = self.copy
        for span in self.spans[:self.count]:
            memcpy(span.address, copy, span.nbytes)
            copy += span.nbytes

    def copies(self) -> list:
        """The parts as they were then, each as bytes."""
        cdef const char *copy = self.copy
        found = []
        for span in self.spans[:self.count]:
            found.append(PyBytes_FromStringAndSize(copy, span.nbytes))
            copy += span.nbytes
        return found
