from minato._core._records_c cimport Records


cdef class Claims(Records):
    pass
