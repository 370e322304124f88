# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True
# cython: initializedcheck=False
"""The hot functions compiled. `pure` is the law: same names, same results, same exceptions.

Whatever is unusual (an error above all) is handed to `pure`, so its verdict and its words are
written once. Nothing here reads beyond a length that was checked before.
"""

from cpython.buffer cimport PyBUF_SIMPLE, PyBuffer_Release, PyObject_GetBuffer
from cpython.bytearray cimport PyByteArray_AS_STRING, PyByteArray_GET_SIZE, PyByteArray_Resize
from cpython.bytes cimport (
    PyBytes_AS_STRING,
    PyBytes_CheckExact,
    PyBytes_FromStringAndSize,
    PyBytes_GET_SIZE,
)
from cpython.exc cimport PyErr_Clear
from cpython.mem cimport PyMem_Free, PyMem_Malloc, PyMem_Realloc
from cpython.object cimport PyObject
from cpython.ref cimport Py_DECREF, Py_INCREF
from cpython.unicode cimport PyUnicode_DecodeUTF8
from libc.stdint cimport int32_t, int64_t, uint8_t, uint32_t, uint64_t
from libc.string cimport memchr, memcmp, memcpy, memset

from cosmodrome import layout
from cosmodrome.errors import MessageTooLarge, StoreError
from cosmodrome.speed.core import pure

cdef extern from "Python.h":
    int PyUnicode_KIND(object text)
    void *PyUnicode_DATA(object text)
    Py_ssize_t PyUnicode_GET_LENGTH(object text)
    Py_UCS4 PyUnicode_READ(int kind, void *data, Py_ssize_t index)
    PyObject *decode_utf8 "PyUnicode_DecodeUTF8"(
        const char *data, Py_ssize_t size, const char *errors
    )
    const char *PyUnicode_AsUTF8AndSize(object text, Py_ssize_t *size) except NULL

cdef int SERIALIZE_JSON = layout.SERIALIZE_JSON
cdef int SERIALIZE_BINARY = layout.SERIALIZE_BINARY
cdef int32_t MAGIC_RECORD = layout.MAGIC_RECORD
cdef int32_t MAGIC_RECORD_V2 = layout.MAGIC_RECORD_V2
cdef int32_t MAGIC_BLANK = layout.MAGIC_BLANK
cdef int32_t SYS_TRANSACTION_MASK = layout.SYS_TRANSACTION_MASK
cdef int32_t SYS_PREPARED = layout.SYS_PREPARED
cdef int32_t SYS_ROLLBACK = layout.SYS_ROLLBACK
cdef int32_t SYS_BORN_V6 = layout.SYS_BORN_V6
cdef int32_t SYS_STORE_V6 = layout.SYS_STORE_V6
cdef uint32_t CRC_MASK = layout.CRC_MASK
cdef Py_ssize_t HOST_V4_BYTES = layout.HOST_V4_BYTES
cdef Py_ssize_t HOST_V6_BYTES = layout.HOST_V6_BYTES
cdef Py_ssize_t HEAD_BYTES = layout.RECORD_HEAD.size
cdef Py_ssize_t MIDDLE_BYTES = layout.RECORD_MIDDLE.size
cdef Py_ssize_t RECORD_BYTES_MIN = layout.RECORD_BYTES_MIN
cdef Py_ssize_t SECTOR_BYTES = layout.SECTOR_BYTES
cdef Py_ssize_t QUEUE_ENTRY_BYTES = layout.QUEUE_ENTRY_BYTES
cdef int64_t QUEUE_OFFSET_LIMIT = layout.QUEUE_OFFSET_LIMIT
cdef int32_t QUEUE_FILLER_SIZE = layout.QUEUE_FILLER_SIZE
cdef Py_ssize_t INDEX_ENTRY_BYTES = layout.INDEX_ENTRY.size
cdef Py_ssize_t INDEX_KEY_BYTES = layout.INDEX_KEY.size
cdef Py_ssize_t TOPIC_BYTES_MAX = layout.TOPIC_BYTES_MAX
cdef Py_ssize_t PROPERTIES_BYTES_MAX = layout.PROPERTIES_BYTES_MAX
cdef Py_ssize_t BINARY_HEADER_BYTES = layout.BINARY_HEADER.size
cdef Py_ssize_t SLOT_PAGE_BYTES = pure.SLOT_PAGE_BYTES

cdef enum:  # why a walk ended, as in `layout`
    WALK_MORE = 0
    WALK_BLANK = 1
    WALK_EMPTY = 2
    WALK_CORRUPT = 3

cdef dict _language_codes = {name.encode(): code for code, name in enumerate(pure.LANGUAGES)}
cdef list _language_names = [name.encode() for name in pure.LANGUAGES]
cdef int LANGUAGE_COUNT = len(pure.LANGUAGES)
cdef int LANGUAGE_OTHER = pure.LANGUAGE_OTHER


cdef inline str _text(const uint8_t *at, Py_ssize_t size):
    return PyUnicode_DecodeUTF8(<const char *>at, size, "replace")


include "checksum.pxi"
include "headers.pxi"
include "records.pxi"
include "gathering.pxi"
include "tails.pxi"
include "entries.pxi"
