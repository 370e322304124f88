"""What `lane`, `pulls` and `arrow` share with `native`: numbers, the scanner of JSON, the checksum,
what queues and index need of a record, the choice of records."""

from cpython.object cimport PyObject
from libc.stdint cimport int16_t, int32_t, int64_t, uint8_t, uint16_t, uint32_t, uint64_t
from libc.string cimport memcpy


# Numbers as they stand in frames and records, the highest byte first.
cdef extern from *:
    """
    #include <stdint.h>
    #include <string.h>
    #if defined(__GNUC__) && __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__
    #define BIG16(value) __builtin_bswap16(value)
    #define BIG32(value) __builtin_bswap32(value)
    #define BIG64(value) __builtin_bswap64(value)
    #else
    static inline uint16_t BIG16(uint16_t value) {
        const uint8_t bytes[2] = {(uint8_t)(value >> 8), (uint8_t)value};
        memcpy(&value, bytes, 2);
        return value;
    }
    static inline uint32_t BIG32(uint32_t value) {
        const uint8_t bytes[4] = {
            (uint8_t)(value >> 24), (uint8_t)(value >> 16), (uint8_t)(value >> 8), (uint8_t)value
        };
        memcpy(&value, bytes, 4);
        return value;
    }
    static inline uint64_t BIG64(uint64_t value) {
        const uint32_t halves[2] = {BIG32((uint32_t)(value >> 32)), BIG32((uint32_t)value)};
        memcpy(&value, halves, 8);
        return value;
    }
    #endif
    """
    uint16_t BIG16(uint16_t value) noexcept nogil
    uint32_t BIG32(uint32_t value) noexcept nogil
    uint64_t BIG64(uint64_t value) noexcept nogil


cdef inline int16_t _i16(const uint8_t *at) noexcept nogil:
    cdef uint16_t value
    memcpy(&value, at, 2)
    return <int16_t>BIG16(value)


cdef inline int32_t _i32(const uint8_t *at) noexcept nogil:
    cdef uint32_t value
    memcpy(&value, at, 4)
    return <int32_t>BIG32(value)


cdef inline int64_t _i64(const uint8_t *at) noexcept nogil:
    cdef uint64_t value
    memcpy(&value, at, 8)
    return <int64_t>BIG64(value)


cdef inline uint8_t *_put16(uint8_t *at, uint32_t value) noexcept nogil:
    cdef uint16_t big = BIG16(<uint16_t>value)
    memcpy(at, &big, 2)
    return at + 2


cdef inline uint8_t *_put32(uint8_t *at, uint32_t value) noexcept nogil:
    cdef uint32_t big = BIG32(value)
    memcpy(at, &big, 4)
    return at + 4


cdef inline uint8_t *_put64(uint8_t *at, uint64_t value) noexcept nogil:
    cdef uint64_t big = BIG64(value)
    memcpy(at, &big, 8)
    return at + 8


cdef inline uint8_t *_put(uint8_t *at, const void *data, Py_ssize_t size) noexcept nogil:
    if size:
        memcpy(at, data, size)
    return at + size


# Steps of 16 bytes where every processor of the kind has them, else single ones. Nothing is read
# at or behind an end.
cdef extern from *:
    """
    #include <stddef.h>
    #include <stdint.h>
    #include <string.h>
    #ifdef __SSE2__
    #include <emmintrin.h>
    #endif

    /* The first quote, backslash or control character, or the end. */
    static inline const uint8_t *span_stop(const uint8_t *at, const uint8_t *end) {
    #ifdef __SSE2__
        const __m128i quote = _mm_set1_epi8(34), slash = _mm_set1_epi8(92), low = _mm_set1_epi8(31);
        for (; end - at >= 16; at += 16) {
            __m128i some = _mm_loadu_si128((const __m128i *)at);
            __m128i found = _mm_or_si128(_mm_cmpeq_epi8(some, quote), _mm_cmpeq_epi8(some, slash));
            found = _mm_or_si128(found, _mm_cmpeq_epi8(_mm_min_epu8(some, low), some));
            int mask = _mm_movemask_epi8(found);
            if (mask)
                return at + __builtin_ctz(mask);
        }
    #endif
        while (at < end && *at != 34 && *at != 92 && *at >= 32)
            at++;
        return at;
    }

    /* Whether a byte is not ASCII. */
    static inline int has_high(const uint8_t *at, size_t size) {
        uint64_t seen = 0, a, b, c, d;
        if (size < 8) {
            for (; size; at++, size--)
                seen |= *at;
            return (seen & 0x80) != 0;
        }
        for (; size >= 32; at += 32, size -= 32) {
            memcpy(&a, at, 8);
            memcpy(&b, at + 8, 8);
            memcpy(&c, at + 16, 8);
            memcpy(&d, at + 24, 8);
            seen |= a | b | c | d;
        }
        for (; size >= 8; at += 8, size -= 8) {
            memcpy(&a, at, 8);
            seen |= a;
        }
        memcpy(&a, at + size - 8, 8);  /* some of these were seen before */
        seen |= a;
        return (seen & 0x8080808080808080u) != 0;
    }
    """
    const uint8_t *span_stop(const uint8_t *at, const uint8_t *end) noexcept nogil
    bint has_high(const uint8_t *at, size_t size) noexcept nogil


cdef inline bint _blank(uint8_t byte) noexcept nogil:
    return byte == 32 or byte == 9 or byte == 10 or byte == 13


cdef inline const uint8_t *_past_blanks(const uint8_t *at, const uint8_t *end) noexcept nogil:
    """The next byte that is not white space, or the end."""
    while at < end and at[0] <= 32 and _blank(at[0]):
        at += 1
    return at


cdef inline const uint8_t *_span_end(
    const uint8_t *at, const uint8_t *end, bint *escaped
) noexcept nogil:
    """The quote that ends a string, from behind the one that begins it; NULL without one."""
    at = span_stop(at, end)
    escaped[0] = False
    while at < end and at[0] == 92:
        escaped[0] = True
        if end - at < 2:
            return NULL
        at = span_stop(at + 2, end)
    return at if at < end and at[0] == 34 else NULL


cdef inline const uint8_t *_int_end(
    const uint8_t *at, const uint8_t *end, int64_t *value
) noexcept nogil:
    """Behind a plain integer of at most ten digits, written as Java would write it; NULL if not."""
    cdef bint negative = at < end and at[0] == 45
    cdef const uint8_t *first
    cdef int64_t total = 0
    at += negative
    first = at
    while at < end and 48 <= at[0] <= 57:
        if at - first == 10:
            return NULL
        total = total * 10 + (at[0] - 48)
        at += 1
    if at == first or (first[0] == 48 and (negative or at - first > 1)):
        return NULL
    if at < end and (at[0] == 46 or at[0] == 69 or at[0] == 101):
        return NULL
    value[0] = -total if negative else total
    return at


cdef Py_ssize_t _unescape(const uint8_t *at, Py_ssize_t size, uint8_t *out) noexcept nogil
cdef bint _is_utf8(const uint8_t *at, Py_ssize_t size)
cdef uint32_t _checksum(const uint8_t *at, Py_ssize_t size) noexcept nogil


cdef struct Facts:
    const uint8_t *tags
    Py_ssize_t tags_bytes
    const uint8_t *words
    Py_ssize_t words_bytes
    const uint8_t *unique
    Py_ssize_t unique_bytes
    int32_t level


cdef void _read_facts(const uint8_t *at, Py_ssize_t size, Facts *facts) noexcept nogil
cdef int64_t _tags_code(Facts *facts) except? -1
cdef uint32_t _prefix(str topic) except? 0
cdef Py_ssize_t _keys_max(Facts *facts) noexcept nogil
cdef uint8_t *_put_keys(
    uint8_t *to, PyObject *topic, uint32_t prefix, Facts *facts, int64_t log_offset,
    int64_t store_ms,
) except NULL


cdef struct Span:
    Py_ssize_t at
    Py_ssize_t size


cdef struct Choice:
    # One log file, and what of the log may be read.
    const uint8_t *data
    int64_t base
    int64_t low
    int64_t high
    # Which records: of this queue (-1: of any), of these tags (NULL: of all).
    int32_t queue_id
    int64_t queue_offset  # of the first entry
    const uint32_t *codes
    Py_ssize_t code_count
    # How many.
    int64_t count_max
    int64_t bytes_max
    int64_t cold_count_max
    int64_t cold_bytes_max
    int64_t cold_below
    # What was taken, before this choice and with it.
    int64_t count
    int64_t taken_bytes
    # What was chosen; the memory of the spans is the caller's to free.
    Py_ssize_t index  # of the first entry that is not done with
    int64_t last  # log offset of the last entry looked at, -1 without one
    bint full
    Py_ssize_t found_bytes
    Span *spans
    Py_ssize_t span_count
    Py_ssize_t span_room


cdef Py_ssize_t _codes(codes, uint32_t **out) except -1
cdef int _choose(Choice *choice, const uint8_t *entries, Py_ssize_t index, Py_ssize_t entry_count) except -1
cdef uint8_t *_copy(Choice *choice, uint8_t *to) noexcept nogil


# Data that will be met soon and is in no cache.
cdef extern from *:
    """
    #if defined(__GNUC__) || defined(__clang__)
    #define ask_for(at) __builtin_prefetch((at), 1)
    #else
    #define ask_for(at) ((void)(at))
    #endif
    """
    void ask_for(const uint8_t *at) noexcept nogil


cdef class Tail:
    cdef public object owner  # the queue; None once it is gone
    cdef readonly bytearray data
    cdef public int64_t at  # the position of its first byte
    cdef public int64_t log_end  # end of the record that the last entry names
    cdef public bint dirty  # whether whoever writes entries to files knows of it


cdef class QueueEnd:
    cdef public int64_t next  # negative once the queue is gone
    cdef Tail tail  # of its queue, None as long as nobody looked
    cdef uint64_t sign  # of its topic
    cdef uint64_t mark  # whose numbers `run` is of
    cdef Py_ssize_t run
    cdef readonly tuple key


cdef struct OneRun:
    PyObject *queue_end
    int64_t first  # offset
    int64_t count
    uint8_t *to  # where the next entry goes


cdef class Runs:
    cdef OneRun *runs
    cdef Py_ssize_t count, room
    cdef bytes entries

    cdef Py_ssize_t add(self, QueueEnd queue_end) except -1
    cdef int allot(self) except -1
    cdef const uint8_t *begin(self) noexcept
