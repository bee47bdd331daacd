"""Lists of Python objects in one stretch of memory."""

from pickle import loads

from cpython.bytes cimport PyBytes_FromStringAndSize
from cpython.list cimport PyList_New, PyList_SET_ITEM
from cpython.memoryview cimport PyMemoryView_FromMemory
from cpython.buffer cimport PyBUF_READ
from cpython.ref cimport Py_INCREF
from cpython.tuple cimport PyTuple_New, PyTuple_SET_ITEM
from cpython.unicode cimport PyUnicode_DecodeUTF8
from libc.stdint cimport int64_t, uint8_t

__all__ = ["Column"]

cdef enum:
    BOOL
    INT
    FLOAT
    STR
    BYTES
    PICKLE
    LIST
    TUPLE
    DICT

cdef dict KINDS = {
    "bool": BOOL,
    "int": INT,
    "float": FLOAT,
    "str": STR,
    "bytes": BYTES,
    "pickle": PICKLE,
    "list": LIST,
    "tuple": TUPLE,
    "dict": DICT,
}


cdef class Column:
    """A list that cannot be changed. Each access makes new objects, equal to those that were stored.

    Args:
        layout: What the list consists of, ``(kind, length, start, offsets, keys, children)``. ``kind`` is one of

            * ``"bool"``, ``"int"``, ``"float"``: 1 or 8 bytes an item, from byte ``start`` of the memory;
            * ``"str"`` (UTF-8), ``"bytes"``, ``"pickle"``: the bytes of all items from ``start``; item ``i`` ends
              where item ``i + 1`` begins, and the ``length + 1`` beginnings, as int64, stand from byte ``offsets``;
            * ``"list"``: item ``i`` is ``children[0][begin:end]``, with beginnings as above;
            * ``"tuple"``: one column for each place;
            * ``"dict"``: one column for each key, in their order.

            Every start is a multiple of 8.
        memory: shape (nbytes,), uint8, C-contiguous. Not written by anybody as long as the column lives.
    """

    cdef int kind
    cdef Py_ssize_t length
    cdef const char* data
    cdef const int64_t* offsets
    cdef tuple keys, children
    cdef object memory

    def __init__(self, tuple layout not None, memory not None):
        cdef const uint8_t[::1] view = memory
        cdef Py_ssize_t start, offsets, end
        kind, self.length, start, offsets, self.keys, children = layout
        self.kind = KINDS[kind]
        self.children = tuple([Column(child, memory) for child in children])
        end = start
        if self.kind in (BOOL, INT, FLOAT):
            end = start + self.length * (1 if self.kind == BOOL else 8)
        elif self.kind in (STR, BYTES, PICKLE, LIST):
            end = offsets + 8 * (self.length + 1)
        if min(start, offsets, self.length) < 0 or max(start, end) > view.shape[0]:
            raise ValueError(f"{kind} of {self.length} items does not fit {view.shape[0]} bytes")
        self.memory = memory
        if view.shape[0]:
            self.data = <const char*> &view[0] + start
            self.offsets = <const int64_t*> (<const char*> &view[0] + offsets)

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        """One item, or a list of those of a slice."""
        cdef Py_ssize_t i
        if isinstance(index, slice):
            return [self.get(i) for i in range(*index.indices(self.length))]
        i = index
        if i < 0:
            i += self.length
        if not 0 <= i < self.length:
            raise IndexError(f"index {index} is out of range for {self.length} items")
        return self.get(i)

    def __iter__(self):
        cdef Py_ssize_t i
        for i in range(self.length):
            yield self.get(i)

    cdef object get(self, Py_ssize_t i):
        cdef int kind = self.kind
        cdef const char* begin
        cdef Py_ssize_t nbytes
        if kind == INT:
            return (<const int64_t*> self.data)[i]
        if kind == FLOAT:
            return (<const double*> self.data)[i]
        if kind == BOOL:
            return self.data[i] != 0
        if kind == TUPLE:
            return self.get_tuple(i)
        if kind == DICT:
            return self.get_dict(i)
        if kind == LIST:
            return self.get_list(self.offsets[i], self.offsets[i + 1])
        begin, nbytes = self.data + self.offsets[i], self.offsets[i + 1] - self.offsets[i]
        if kind == STR:
            return PyUnicode_DecodeUTF8(<char*> begin, nbytes, "surrogatepass")
        if kind == BYTES:
            return PyBytes_FromStringAndSize(begin, nbytes)
        return loads(PyMemoryView_FromMemory(<char*> begin, nbytes, PyBUF_READ))

    cdef tuple get_tuple(self, Py_ssize_t i):
        cdef Py_ssize_t j, n = len(self.children)
        cdef tuple items = PyTuple_New(n)
        for j in range(n):
            value = (<Column> self.children[j]).get(i)
            Py_INCREF(value)
            PyTuple_SET_ITEM(items, j, value)
        return items

    cdef dict get_dict(self, Py_ssize_t i):
        cdef Py_ssize_t j
        cdef dict items = {}
        for j in range(len(self.children)):
            items[self.keys[j]] = (<Column> self.children[j]).get(i)
        return items

    cdef list get_list(self, Py_ssize_t begin, Py_ssize_t end):
        cdef Column child = <Column> self.children[0]
        cdef Py_ssize_t j
        cdef list items = PyList_New(end - begin)
        for j in range(end - begin):
            value = child.get(begin + j)
            Py_INCREF(value)
            PyList_SET_ITEM(items, j, value)
        return items
