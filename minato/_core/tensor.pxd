"""How a tensor of a sample is looked at, and written to its place."""

from cpython.object cimport PyObject
from cpython.tuple cimport PyTuple_GET_ITEM, PyTuple_GET_SIZE
from libc.stdint cimport int32_t, int64_t, uint8_t, uint16_t, uint32_t, uint64_t, uintptr_t
from libc.string cimport memcpy

from minato._core.leaf cimport (
    MN_MAX_AXES, Node, Py_TYPE, mn_nest, mn_nest_add, mn_nest_start, run,
)


cdef enum:
    DLPACK_CPU = 1

# The parts of DLPack's C structures that describe a tensor; version 1 fixes their layout.
cdef struct DLTensor:
    void *data
    int32_t device_type
    int32_t device_id
    int32_t ndim
    uint8_t code
    uint8_t bits
    uint16_t lanes
    int64_t *shape
    int64_t *strides  # in items
    uint64_t byte_offset

ctypedef int (*describe_t)(PyObject *, DLTensor *) except -1

cdef struct DLPackExchangeAPI:
    uint32_t major
    uint32_t minor
    void *previous
    void *other_functions[3]
    describe_t describe

cdef struct Torch:
    describe_t describe  # NULL where torch is too old to offer it
    PyObject *Tensor
    PyObject *strided
    # as in tensor_memory.TensorMemory; impl is 0 where that is not known
    Py_ssize_t impl
    Py_ssize_t keys
    uint64_t plain_keys
    Py_ssize_t gradient
    Py_ssize_t dtype

# Items of a run of samples, copied when all samples have been looked at: to look at one finds its memory in the cache.
cdef struct Move:
    char *dst
    const char *src
    Py_ssize_t nbytes

cdef struct Moves:
    Move *next
    Py_ssize_t kept_nbytes  # tensors of at least this many bytes are left to the caller


cdef extern from *:
    """
    /* A compiler leaves out calls of functions that only prefetch, unless they seem to do more. */
    static inline void mn_prefetch(const char *address) {
        __builtin_prefetch(address);
        __asm__("" ::: "memory");
    }
    static inline int mn_is_exactly(PyObject *x, PyObject *kind) { return (PyObject *)Py_TYPE(x) == kind; }
    """
    void mn_prefetch(const char *address) noexcept
    bint mn_is_exactly(PyObject *x, PyObject *kind) noexcept


cdef inline void load_ahead(const Torch *torch, PyObject *x) noexcept:
    """Have the processor load what ``is_plain`` and ``describe`` read of a tensor."""
    cdef const char *impl
    if mn_is_exactly(x, torch.Tensor):
        impl = (<const char **> (<const char *> x + torch.impl))[0]
        mn_prefetch(impl)
        mn_prefetch(impl + 64)
        mn_prefetch(impl + 128)


cdef inline bint describe(const Torch *torch, object x, DLTensor *view, int64_t *room) except -1:
    """Fill in address, shape and strides of a dense tensor on the CPU; False if it is none."""
    cdef Py_ssize_t i
    if torch.describe is not NULL:
        torch.describe(<PyObject *> x, view)
        return view.device_type == DLPACK_CPU and view.ndim <= MN_MAX_AXES
    if <PyObject *> x.layout is not torch.strided or not x.is_cpu:
        return False
    shape, strides = x.shape, x.stride()
    view.ndim = PyTuple_GET_SIZE(shape)
    if view.ndim > MN_MAX_AXES:
        return False
    view.data = <void *> <uintptr_t> x.data_ptr()
    view.byte_offset = 0
    view.shape = room
    view.strides = room + MN_MAX_AXES
    for i in range(view.ndim):
        view.shape[i] = <object> PyTuple_GET_ITEM(shape, i)
        view.strides[i] = <object> PyTuple_GET_ITEM(strides, i)
    return True


cdef inline bint has_shape(const Node *node, const DLTensor *view) noexcept:
    cdef int i
    if view.ndim != node.ndim or (view.data is NULL and node.nbytes):
        return False
    for i in range(node.ndim):
        if view.shape[i] != node.shape[i]:
            return False
    return True


cdef inline bint is_one_run(const Node *node, const DLTensor *view) noexcept:
    cdef int i
    for i in range(node.ndim):
        if node.shape[i] != 1 and view.strides[i] * node.itemsize != node.steps[i]:
            return False
    return True


cdef inline void make_moves(const Move *move, const Move *end) noexcept nogil:
    while move is not end:
        memcpy(move.dst, move.src, move.nbytes)
        move += 1


cdef inline void write_described(const Node *node, const DLTensor *view, char *place) noexcept:
    cdef mn_nest nest
    cdef int i
    mn_nest_start(&nest, node.itemsize)
    for i in range(node.ndim):
        mn_nest_add(&nest, node.shape[i], node.steps[i], view.strides[i] * node.itemsize)
    run(&nest, place, <char *> view.data + view.byte_offset, node.nbytes)


cdef inline bint is_plain(const Torch *torch, const Node *node, object x) except -1:
    """Whether x has the node's dtype, needs no gradient, and has no lazy operation."""
    cdef const char *impl
    if torch.impl:
        impl = (<const char **> (<const char *> <PyObject *> x + torch.impl))[0]
        if impl is not NULL and (<const uint64_t *> (impl + torch.keys))[0] == torch.plain_keys:
            return (<const uint16_t *> (impl + torch.dtype))[0] == node.type_num and (
                (<const uintptr_t *> (impl + torch.gradient))[0] == 0 or not x.requires_grad
            )
    return (
        <PyObject *> x.dtype is node.exact
        and not x.requires_grad
        and not x.is_neg()
        and not (node.is_complex and x.is_conj())
        # of a zero tensor this raises; the address of its row is the row's offset
        and (node.nbytes == 0 or x.untyped_storage().data_ptr() != 0)
    )


cdef inline bint fits_tensor(
    const Torch *torch, const Node *node, object x, DLTensor *view, int64_t *room
) except -1:
    return (
        <PyObject *> Py_TYPE(x) is torch.Tensor
        and is_plain(torch, node, x)
        and describe(torch, x, view, room)
        and has_shape(node, view)
    )


cdef inline bint write_tensor(
    const Torch *torch, const Node *node, object x, char *place, list aside, list held, Moves *moves
) except -1:
    cdef DLTensor view
    cdef int64_t room[2 * MN_MAX_AXES]
    if not fits_tensor(torch, node, x, &view, room):
        return False
    if moves is not NULL and node.nbytes >= moves.kept_nbytes:
        aside.append(x)
    elif node.nbytes == 0:  # its address may be NULL, from which not even nothing may be copied
        pass
    elif moves is not NULL and is_one_run(node, &view):
        held.append(x)
        moves.next.dst = place
        moves.next.src = <char *> view.data + view.byte_offset
        moves.next.nbytes = node.nbytes
        moves.next += 1
    elif place is not NULL:
        write_described(node, &view, place)
    return True
