"""How one leaf of a sample is described, and written to its place."""

from cpython.float cimport PyFloat_AS_DOUBLE
from cpython.long cimport PyLong_AsLongLongAndOverflow
from cpython.object cimport PyObject, PyTypeObject
from libc.stdint cimport int64_t
from libc.string cimport memcpy

cimport numpy as cnp


cdef extern from "Python.h":
    PyTypeObject *Py_TYPE(object)


cdef extern from "strided.h" nogil:
    enum: MN_MAX_AXES
    ctypedef struct mn_nest:
        pass
    void mn_nest_start(mn_nest *nest, Py_ssize_t item)
    void mn_nest_add(mn_nest *nest, Py_ssize_t size, Py_ssize_t dst, Py_ssize_t src)
    void mn_nest_run(mn_nest *nest, char *dst, const char *src)


cdef enum Kind:
    TENSOR, ARRAY, SCALAR, FLOAT, INT, BOOL, TEXT, LIST, TUPLE, DICT

cdef struct Node:
    Kind kind
    int type_num         # numpy's number of the item's dtype, or torch's
    int ndim             # of the item
    bint is_complex
    Py_ssize_t *shape    # of the item
    Py_ssize_t *steps    # bytes from one element of the item to the next, along each axis
    Py_ssize_t itemsize  # bytes of an element
    Py_ssize_t nbytes    # bytes of the item
    Py_ssize_t offset    # bytes from the region to the field
    Py_ssize_t length    # number of children; their nodes follow
    PyObject *exact      # torch's dtype, or a type, or the keys of a dict; for an array, another type that fits


cdef inline void run(mn_nest *nest, char *dst, const char *src, Py_ssize_t nbytes) noexcept:
    if nbytes < 32768:  # sooner done than others would have taken the GIL
        mn_nest_run(nest, dst, src)
    else:
        with nogil:
            mn_nest_run(nest, dst, src)


cdef inline int set_item(
    Node *node, Py_ssize_t itemsize, tuple shape, Py_ssize_t *axes
) except -1:
    cdef int axis
    cdef Py_ssize_t step = itemsize
    node.itemsize = itemsize
    node.ndim = len(shape)
    node.shape, node.steps = axes, axes + node.ndim
    for axis in range(node.ndim - 1, -1, -1):
        node.shape[axis] = shape[axis]
        node.steps[axis] = step
        step *= node.shape[axis]
    node.nbytes = step
    return 0


cdef inline bint write_array(const Node *node, object x, char *place) except -1:
    cdef cnp.ndarray array
    cdef mn_nest nest
    cdef Py_ssize_t stride
    cdef int i
    if not cnp.PyArray_CheckExact(x) and <PyObject *> Py_TYPE(x) is not node.exact:
        return False
    array = x
    if cnp.PyArray_TYPE(array) != node.type_num or cnp.PyArray_NDIM(array) != node.ndim:
        return False
    if not cnp.PyArray_ISNOTSWAPPED(array):
        return False
    mn_nest_start(&nest, node.itemsize)
    for i in range(node.ndim):
        stride = array.strides[i]
        # torch views no array whose strides are negative or no multiple of an element
        if array.shape[i] != node.shape[i] or stride < 0 or stride % node.itemsize:
            return False
        mn_nest_add(&nest, node.shape[i], node.steps[i], stride)
    if node.nbytes and place is not NULL:
        run(&nest, place, cnp.PyArray_BYTES(array), node.nbytes)
    return True


cdef inline bint write_number(const Node *node, object x, char *place) except -1:
    cdef int64_t room[2]  # numpy stores as the dtype is aligned, which the place might not be
    cdef double as_double
    cdef long long as_int64
    cdef int overflow = 0
    if <PyObject *> Py_TYPE(x) is not node.exact:
        return False
    if node.kind == INT:
        as_int64 = PyLong_AsLongLongAndOverflow(x, &overflow)
    if overflow or place is NULL:
        return not overflow
    if node.kind == INT:
        memcpy(place, &as_int64, 8)
    elif node.kind == FLOAT:
        as_double = PyFloat_AS_DOUBLE(x)
        memcpy(place, &as_double, 8)
    elif node.kind == BOOL:
        place[0] = x is True
    else:
        cnp.PyArray_ScalarAsCtype(x, room)
        memcpy(place, room, node.nbytes)
    return True
