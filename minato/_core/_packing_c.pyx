"""Copies of samples to their place in a batch.

``_packing_py`` says which arguments each function takes, what it returns, and what it raises.
"""

from cpython.dict cimport PyDict_Next, PyDict_Size
from cpython.list cimport PyList_GET_SIZE
from cpython.mem cimport PyMem_Calloc, PyMem_Free, PyMem_Malloc
from cpython.object cimport PyObject
from cpython.pycapsule cimport PyCapsule_GetPointer
from cpython.tuple cimport PyTuple_GET_ITEM, PyTuple_GET_SIZE
from libc.limits cimport LONG_MAX
from libc.stdint cimport uintptr_t

cimport cython
cimport numpy as cnp

from minato._core.leaf cimport (
    ARRAY, BOOL, DICT, FLOAT, INT, LIST, Node, Py_TYPE, SCALAR, TENSOR, TEXT, TUPLE, set_item, write_array,
    write_number,
)
from minato._core.tensor cimport (
    DLPackExchangeAPI, Move, Moves, Torch, describe_t, load_ahead, make_moves, write_tensor,
)

import torch

from minato._core import tensor_memory
from minato._core.sample_spec import flatten

__all__ = ["Packer", "types_in"]

cnp.import_array()


cdef describe_t find_describe() except? NULL:
    """Torch's C function that describes a tensor, or NULL where torch is too old to offer it."""
    cdef DLPackExchangeAPI *api
    capsule = getattr(torch.Tensor, "__dlpack_c_exchange_api__", None)
    if capsule is None:
        return NULL
    api = <DLPackExchangeAPI *> PyCapsule_GetPointer(capsule, "dlpack_exchange_api")
    return api.describe if api.major == 1 else NULL

cdef object Tensor = torch.Tensor, strided = torch.strided
cdef Torch TORCH
TORCH.describe, TORCH.Tensor, TORCH.strided = find_describe(), <PyObject *> Tensor, <PyObject *> strided

cdef object memory = tensor_memory.find()
if memory is not None:
    TORCH.impl, TORCH.keys, TORCH.plain_keys = memory.impl, memory.keys, memory.plain_keys
    TORCH.gradient, TORCH.dtype = memory.gradient, memory.dtype

cdef dict KINDS = {
    "tensor": TENSOR, "array": ARRAY, "scalar": SCALAR, "float": FLOAT, "int": INT, "bool": BOOL,
    "text": TEXT, "list": LIST, "tuple": TUPLE, "namedtuple": TUPLE, "dict": DICT,
}


def types_in(list values not None) -> list:
    """Return the types of some values, each once, in the order of their first values."""
    cdef PyObject *last = NULL
    cdef list found = []
    for value in values:
        if <PyObject *> Py_TYPE(value) is last:
            continue
        last = <PyObject *> Py_TYPE(value)
        for known in found:
            if <PyObject *> known is last:
                break
        else:
            found.append(<object> last)
    return found


cdef bint same_key(object one, object other) except -1:
    return type(one) is type(other) and one == other


@cython.final
cdef class Packer:
    """Writes samples of one known structure into the fields of a batch of ``n`` samples."""

    cdef Node *nodes       # in the order of the tree
    cdef Py_ssize_t *axes  # shapes and steps of all nodes
    cdef Py_ssize_t n
    cdef Py_ssize_t num_fields
    cdef bint has_texts
    cdef bint has_tensors
    cdef list kept         # what the nodes borrow

    def __cinit__(self, spec, Py_ssize_t n):
        cdef Py_ssize_t i, next_axis = 0
        cdef Node *node
        self.n = n
        self.kept = flatten(spec)
        self.nodes = <Node *> PyMem_Calloc(len(self.kept), sizeof(Node))
        self.axes = <Py_ssize_t *> PyMem_Calloc(sum([2 * len(row.shape) for row in self.kept]), 8)
        if self.nodes is NULL or self.axes is NULL:
            raise MemoryError
        for i, row in enumerate(self.kept):
            node = self.nodes + i
            node.kind = KINDS[row.tag]
            node.exact = <PyObject *> row.exact
            node.offset = row.offset
            node.length = row.length
            self.has_texts = self.has_texts or node.kind == TEXT
            self.has_tensors = self.has_tensors or node.kind == TENSOR
            if row.dtype is None:
                continue
            self.num_fields += 1
            if node.kind == ARRAY:
                node.type_num = row.dtype.num
            elif node.kind == TENSOR and memory is not None:
                node.type_num = memory.dtypes[row.dtype]
            node.is_complex = node.kind == TENSOR and row.dtype.is_complex
            set_item(node, row.dtype.itemsize, row.shape, self.axes + next_axis)
            next_axis += 2 * node.ndim

    def __dealloc__(self):
        PyMem_Free(self.nodes)
        PyMem_Free(self.axes)

    def fits(self, sample) -> bool:
        """Whether :meth:`pack` could write this sample; nothing is written."""
        try:
            return self.write(0, sample, NULL, NULL, 0, [], None, NULL) >= 0
        except Exception:  # only what an unusual sample raises when it is looked at
            return False

    def pack(self, sample, address, Py_ssize_t k) -> list | tuple | None:
        """Write a sample to its place in the region, and nowhere else."""
        cdef char *base = <char *> <uintptr_t> address
        cdef list texts = None
        if not 0 <= k < self.n:
            raise IndexError(f"sample {k} in a batch of {self.n}")
        if self.has_texts:
            texts = []
        try:
            if self.write(0, sample, base, NULL, k, texts, None, NULL) < 0:
                return None
        except Exception:  # only what an unusual sample raises when it is looked at
            return None
        return texts if self.has_texts else ()

    def pack_run(self, list samples, address, Py_ssize_t k) -> list | None:
        """Write a run of samples from place k on."""
        if not 0 <= k <= self.n - len(samples):
            raise IndexError(f"samples {k} to {k + len(samples) - 1} in a batch of {self.n}")
        return self.write_run(samples, <char *> <uintptr_t> address, NULL, k, LONG_MAX)

    def pack_fields(self, list samples, list addresses, Py_ssize_t kept_nbytes) -> list | None:
        """Write all samples of a batch into fields that lie anywhere, except texts and large tensors."""
        cdef char **bases
        cdef Py_ssize_t i, field = 0
        if len(samples) != self.n:
            raise IndexError(f"{len(samples)} samples in a batch of {self.n}")
        if len(addresses) != self.num_fields:
            raise IndexError(f"{len(addresses)} addresses of {self.num_fields} fields")
        bases = <char **> PyMem_Calloc(len(self.kept) + 1, sizeof(char *))
        if bases is NULL:
            raise MemoryError
        try:
            for i in range(len(self.kept)):
                if self.kept[i].dtype is not None:
                    bases[i] = <char *> <uintptr_t> addresses[field]
                    field += 1
            kept_nbytes = LONG_MAX if self.has_texts else kept_nbytes
            return self.write_run(samples, <char *> bases, bases, 0, kept_nbytes)
        finally:
            PyMem_Free(bases)

    cdef list write_run(
        self, list samples, char *base, char **bases, Py_ssize_t k, Py_ssize_t kept_nbytes
    ):
        cdef list aside = [], held = []
        cdef Move *first
        cdef Moves moves
        first = <Move *> PyMem_Malloc((len(samples) * len(self.kept) + 1) * sizeof(Move))
        if first is NULL:
            raise MemoryError
        moves.next, moves.kept_nbytes = first, kept_nbytes
        if self.has_tensors and TORCH.impl:
            self.load_tensors_ahead(samples)
        try:
            for sample in samples:
                if self.write(0, sample, base, bases, k, aside, held, &moves) < 0:
                    return None
                k += 1
            with nogil:
                make_moves(first, moves.next)
        except Exception:  # only what an unusual sample raises when it is looked at
            return None
        finally:
            PyMem_Free(first)
        return aside

    cdef void load_tensors_ahead(self, list samples):
        """Have the processor load what is read of tensors, of many at once: none waits for another, as in ``write``."""
        cdef Py_ssize_t member, cursor
        cdef PyObject *value
        for sample in samples:
            if isinstance(sample, tuple):
                for member in range(PyTuple_GET_SIZE(sample)):
                    load_ahead(&TORCH, PyTuple_GET_ITEM(sample, member))
            elif type(sample) is dict:
                cursor = 0
                with cython.critical_section(sample):
                    while PyDict_Next(sample, &cursor, NULL, &value):
                        load_ahead(&TORCH, value)
            else:
                load_ahead(&TORCH, <PyObject *> sample)

    cdef Py_ssize_t write(
        self,
        Py_ssize_t i,
        object x,
        char *base,
        char **bases,
        Py_ssize_t k,
        list aside,
        list held,
        Moves *moves,
    ) except -2:
        """Write from node i on; return the node that follows, or -1 if x does not fit.

        Without a base it is only looked at. Fields lie from the base on, unless ``bases`` has the start of each. The
        list ``aside`` gets all that is not written; ``held`` keeps alive all that will be moved.
        """
        cdef const Node *node = self.nodes + i
        cdef char *place = NULL
        cdef Py_ssize_t child
        cdef Py_ssize_t cursor = 0
        cdef PyObject *borrowed_key
        cdef PyObject *borrowed
        cdef object found_key, key, value
        if base is not NULL:
            place = (base + node.offset if bases is NULL else bases[i]) + k * node.nbytes
        i += 1
        if node.kind == TENSOR:
            return i if write_tensor(&TORCH, node, x, place, aside, held, moves) else -1
        if node.kind == ARRAY:
            return i if write_array(node, x, place) else -1
        if node.kind in (SCALAR, FLOAT, INT, BOOL):
            return i if write_number(node, x, place) else -1
        if node.kind != DICT and <PyObject *> Py_TYPE(x) is not node.exact:
            return -1
        if node.kind == TEXT:
            aside.append(x)
        elif node.kind == LIST:
            for child in range(node.length):
                # looked up each time: another thread may have changed the list
                if PyList_GET_SIZE(x) != node.length:
                    return -1
                i = self.write(i, (<list> x)[child], base, bases, k, aside, held, moves)
                if i < 0:
                    return -1
            return i if PyList_GET_SIZE(x) == node.length else -1
        elif node.kind == TUPLE:
            if PyTuple_GET_SIZE(x) != node.length:
                return -1
            for child in range(node.length):
                value = <object> PyTuple_GET_ITEM(x, child)
                i = self.write(i, value, base, bases, k, aside, held, moves)
                if i < 0:
                    return -1
        else:
            if type(x) is not dict or PyDict_Size(x) != node.length:
                return -1
            for child in range(node.length):
                with cython.critical_section(x):  # what PyDict_Next finds is borrowed
                    if not PyDict_Next(x, &cursor, &borrowed_key, &borrowed):
                        return -1
                    found_key, value = <object> borrowed_key, <object> borrowed
                key = <object> PyTuple_GET_ITEM(<object> node.exact, child)
                if found_key is not key and not same_key(found_key, key):
                    return -1
                i = self.write(i, value, base, bases, k, aside, held, moves)
                if i < 0:
                    return -1
        return i
