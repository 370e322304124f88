"""What `pulls` shares with `lane`: headers of requests, templates of replies, and counts."""

from libc.stdint cimport int32_t, int64_t, uint8_t


cdef enum:
    SLOTS = 16
    SLOT_SIGNATURE = 14  # of sends; those before it are their fields, in order

cdef enum:
    CODE_SEND = 10
    CODE_PULL = 11
    CODE_COMMIT = 15
    CODE_SEND_V2 = 310
    CODE_SEND_BATCH = 320


cdef struct Text:
    const uint8_t *at  # NULL: not there
    int32_t size
    bint escaped


cdef struct Head:
    int32_t code
    int32_t opaque
    int32_t flag
    int serialize
    const uint8_t *start  # of the header
    const uint8_t *opaque_at  # where the opaque stands, NULL if it does not
    int32_t opaque_bytes
    Text fields[SLOTS]


cdef bint _read_head(const uint8_t *at, Py_ssize_t length, Head *head, const uint8_t **body, Py_ssize_t *body_bytes)
cdef bint _long_number(Text *text, int64_t *value) noexcept nogil
cdef bint _null(const uint8_t *at, Py_ssize_t size) noexcept nogil
cdef _string(Text *text)
cdef Py_ssize_t _frame(const uint8_t *at, Py_ssize_t left) noexcept nogil
cdef Py_ssize_t _digits(uint8_t *to, int64_t value) noexcept nogil


cdef inline bint _number(Text *text, int64_t *value) noexcept nogil:
    """A whole number of at most 18 digits; Java, and so the slow lane, allows zeros in front."""
    if text.size == 1 and 48 <= text.at[0] <= 57:
        value[0] = text.at[0] - 48
        return True
    return _long_number(text, value)


cdef class Template:
    cdef list parts
    cdef bint binary
    cdef Py_ssize_t fields_at  # of the length of all fields, in a binary header
    cdef Py_ssize_t fields_bytes  # that length with empty holes
    cdef Py_ssize_t fixed_bytes
    cdef Py_ssize_t holes

    cdef uint8_t *_part(self, uint8_t *to, Py_ssize_t number) noexcept
    cdef Py_ssize_t _end(self, uint8_t *start, uint8_t *to, int32_t opaque, Py_ssize_t body_bytes) noexcept


cdef class PutSum:
    cdef int64_t requests, messages, size


cdef class PutCounts:
    cdef dict sums

    cdef int count(self, str topic, int64_t requests, int64_t messages, int64_t size) except -1


cdef class GetSum:
    cdef int64_t pulls, messages, size, next_offset
    cdef double ms, longest_ms


cdef class GetCounts:
    cdef dict sums
    cdef readonly int64_t pulls_total, messages_total, bytes_total  # ever

    cdef int count(
        self, tuple key, int64_t pulls, int64_t messages, int64_t size, double ms,
        int64_t next_offset,
    ) except -1
