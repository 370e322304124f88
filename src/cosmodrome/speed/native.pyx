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
from cosmodrome.errors import MessageTooLarge
from cosmodrome.speed import pure

cdef extern from "Python.h":
    int PyUnicode_KIND(object text)
    void *PyUnicode_DATA(object text)
    Py_ssize_t PyUnicode_GET_LENGTH(object text)
    Py_UCS4 PyUnicode_READ(int kind, void *data, Py_ssize_t index)
    PyObject *decode_utf8 "PyUnicode_DecodeUTF8"(
        const char *data, Py_ssize_t size, const char *errors
    )
    const char *PyUnicode_AsUTF8AndSize(object text, Py_ssize_t *size) except NULL

# CRC-32 as zlib computes it, several times faster: 64 bytes per round by carry-less products
# where the processor has them (Gopal et al., "Fast CRC Computation Using PCLMULQDQ", 2009),
# else eight bytes per round by tables.
cdef extern from *:
    """
    #include <stddef.h>
    #include <stdint.h>
    #include <string.h>
    #if (defined(__x86_64__) || defined(__i386__)) && (defined(__GNUC__) || defined(__clang__))
    #define CRC_FOLDS 1
    #include <immintrin.h>
    #endif

    static uint32_t crc_table[8][256];
    static int crc_folds = 0;

    static void crc_prepare(void) {
        for (uint32_t byte = 0; byte < 256; byte++) {
            uint32_t value = byte;
            for (int bit = 0; bit < 8; bit++)
                value = value & 1 ? 0xEDB88320u ^ (value >> 1) : value >> 1;
            crc_table[0][byte] = value;
        }
        for (int row = 1; row < 8; row++)
            for (int byte = 0; byte < 256; byte++) {
                uint32_t value = crc_table[row - 1][byte];
                crc_table[row][byte] = crc_table[0][value & 0xFF] ^ (value >> 8);
            }
    #ifdef CRC_FOLDS
        __builtin_cpu_init();
        crc_folds = __builtin_cpu_supports("pclmul") && __builtin_cpu_supports("sse4.1");
    #endif
    }

    #ifdef CRC_FOLDS
    #define CRC_FOLD(x, k, next) _mm_xor_si128(_mm_xor_si128( \\
        _mm_clmulepi64_si128(x, k, 0x00), _mm_clmulepi64_si128(x, k, 0x11)), next)
    #define CRC_LOAD(at) _mm_loadu_si128((const __m128i *)(at))

    /* `size` is a multiple of 16 and at least 64; the constants are powers of x mod P. */
    __attribute__((target("pclmul,sse4.1")))
    static uint32_t crc_fold(uint32_t crc, const uint8_t *at, size_t size) {
        const __m128i by_512 = _mm_set_epi64x(0x1c6e41596, 0x154442bd4);
        const __m128i by_128 = _mm_set_epi64x(0x0ccaa009e, 0x1751997d0);
        const __m128i by_64 = _mm_set_epi64x(0, 0x163cd6124);
        const __m128i barrett = _mm_set_epi64x(0x1f7011641, 0x1db710641);
        const __m128i low = _mm_setr_epi32(-1, 0, -1, 0);
        __m128i a = _mm_xor_si128(CRC_LOAD(at), _mm_cvtsi32_si128((int)crc));
        __m128i b = CRC_LOAD(at + 16), c = CRC_LOAD(at + 32), d = CRC_LOAD(at + 48), t;
        for (at += 64, size -= 64; size >= 64; at += 64, size -= 64) {
            a = CRC_FOLD(a, by_512, CRC_LOAD(at));
            b = CRC_FOLD(b, by_512, CRC_LOAD(at + 16));
            c = CRC_FOLD(c, by_512, CRC_LOAD(at + 32));
            d = CRC_FOLD(d, by_512, CRC_LOAD(at + 48));
        }
        a = CRC_FOLD(a, by_128, b);
        a = CRC_FOLD(a, by_128, c);
        a = CRC_FOLD(a, by_128, d);
        for (; size >= 16; at += 16, size -= 16)
            a = CRC_FOLD(a, by_128, CRC_LOAD(at));
        t = _mm_clmulepi64_si128(a, by_128, 0x10);
        a = _mm_xor_si128(_mm_srli_si128(a, 8), t);
        t = _mm_srli_si128(a, 4);
        a = _mm_xor_si128(_mm_clmulepi64_si128(_mm_and_si128(a, low), by_64, 0x00), t);
        t = _mm_clmulepi64_si128(_mm_and_si128(a, low), barrett, 0x10);
        t = _mm_clmulepi64_si128(_mm_and_si128(t, low), barrett, 0x00);
        return (uint32_t)_mm_extract_epi32(_mm_xor_si128(a, t), 1);
    }
    #endif

    static uint32_t crc_of(const uint8_t *at, size_t size) {
        uint32_t crc = 0xFFFFFFFFu;
    #ifdef CRC_FOLDS
        if (crc_folds && size >= 64) {
            size_t whole = size & ~(size_t)15;
            crc = crc_fold(crc, at, whole);
            at += whole;
            size -= whole;
        }
    #endif
        for (; size >= 8; at += 8, size -= 8) {
            crc ^= (uint32_t)at[0] | (uint32_t)at[1] << 8 | (uint32_t)at[2] << 16
                | (uint32_t)at[3] << 24;
            crc = crc_table[7][crc & 0xFF] ^ crc_table[6][(crc >> 8) & 0xFF]
                ^ crc_table[5][(crc >> 16) & 0xFF] ^ crc_table[4][crc >> 24]
                ^ crc_table[3][at[4]] ^ crc_table[2][at[5]] ^ crc_table[1][at[6]]
                ^ crc_table[0][at[7]];
        }
        for (; size; at++, size--)
            crc = crc_table[0][(crc ^ *at) & 0xFF] ^ (crc >> 8);
        return ~crc;
    }
    """
    void crc_prepare() noexcept nogil
    uint32_t crc_of(const uint8_t *at, size_t size) noexcept nogil

crc_prepare()

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
cdef int32_t QUEUE_FILLER_SIZE = layout.QUEUE_FILLER_SIZE
cdef Py_ssize_t INDEX_ENTRY_BYTES = layout.INDEX_ENTRY.size
cdef Py_ssize_t INDEX_KEY_BYTES = layout.INDEX_KEY.size
cdef Py_ssize_t TOPIC_BYTES_MAX = layout.TOPIC_BYTES_MAX
cdef Py_ssize_t PROPERTIES_BYTES_MAX = layout.PROPERTIES_BYTES_MAX
cdef Py_ssize_t BINARY_HEADER_BYTES = layout.BINARY_HEADER.size
cdef Py_ssize_t SLOT_PAGE_BYTES = pure.SLOT_PAGE_BYTES

WALK_MORE = pure.WALK_MORE
WALK_BLANK = pure.WALK_BLANK
WALK_EMPTY = pure.WALK_EMPTY
WALK_CORRUPT = pure.WALK_CORRUPT
cdef int MORE = WALK_MORE
cdef int BLANK = WALK_BLANK
cdef int EMPTY = WALK_EMPTY
cdef int CORRUPT = WALK_CORRUPT

cdef dict _language_codes = {name.encode(): code for code, name in enumerate(pure.LANGUAGES)}
cdef list _language_names = [name.encode() for name in pure.LANGUAGES]
cdef int LANGUAGE_COUNT = len(pure.LANGUAGES)
cdef int LANGUAGE_OTHER = pure.LANGUAGE_OTHER


cdef inline str _text(const uint8_t *at, Py_ssize_t size):
    return PyUnicode_DecodeUTF8(<const char *>at, size, "replace")


# --- header --------------------------------------------------------------------------------


def decode_header(int serialize, data):
    if not PyBytes_CheckExact(data):
        data = bytes(data)
    found = None
    if serialize == SERIALIZE_BINARY:
        found = _decode_binary(data)
    elif serialize == SERIALIZE_JSON:
        found = _decode_json(data)
    return found if found is not None else pure.decode_header(serialize, data)


cdef _decode_binary(bytes data):
    cdef const uint8_t *start = <const uint8_t *>PyBytes_AS_STRING(data)
    cdef Py_ssize_t end = PyBytes_GET_SIZE(data)
    cdef Py_ssize_t at = BINARY_HEADER_BYTES
    cdef Py_ssize_t key_bytes, value_bytes, key_at
    cdef int language
    cdef dict ext = {}
    if end < at + 4:
        return None
    value_bytes = _i32(start + 13)
    if value_bytes < 0 or value_bytes > end - at - 4:
        return None
    remark = _text(start + at, value_bytes) if value_bytes else None
    at += value_bytes
    value_bytes = _i32(start + at)
    at += 4
    if value_bytes < 0 or value_bytes > end - at:
        return None
    end = at + value_bytes
    while at < end:
        if end - at < 6:
            return None
        key_bytes = _i16(start + at)
        if key_bytes < 0 or key_bytes > end - at - 6:
            return None
        key_at = at + 2
        at = key_at + key_bytes
        value_bytes = _i32(start + at)
        at += 4
        if value_bytes < 0 or value_bytes > end - at:
            return None
        if key_bytes and value_bytes:
            ext[_text(start + key_at, key_bytes)] = _text(start + at, value_bytes)
        at += value_bytes
    language = <signed char>start[2]
    if not 0 <= language < LANGUAGE_COUNT:
        language = LANGUAGE_OTHER
    return _i16(start), language, _i16(start + 3), _i32(start + 5), _i32(start + 9), remark, ext


cdef struct Scan:
    const uint8_t *at
    const uint8_t *end


cdef inline uint8_t _peek(Scan *scan) noexcept nogil:
    """The next byte that is not white space, 0 at the end."""
    scan.at = _past_blanks(scan.at, scan.end)
    return scan.at[0] if scan.at < scan.end else 0


cdef inline bint _take(Scan *scan, uint8_t byte) noexcept nogil:
    if _peek(scan) != byte:
        return False
    scan.at += 1
    return True


cdef bint _take_word(Scan *scan, const char *word, Py_ssize_t size) noexcept nogil:
    if scan.end - scan.at < size or memcmp(scan.at, word, size) != 0:
        return False
    scan.at += size
    return True


cdef bint _take_int(Scan *scan, int64_t *value) noexcept nogil:
    cdef const uint8_t *at = _int_end(_past_blanks(scan.at, scan.end), scan.end, value)
    if at == NULL:
        return False
    scan.at = at
    return True


cdef bint _take_int32(Scan *scan, int64_t *value) noexcept nogil:
    return _take_int(scan, value) and -0x80000000LL <= value[0] <= 0x7FFFFFFFLL


cdef bint _take_span(Scan *scan, const uint8_t **first, Py_ssize_t *size, bint *escaped) noexcept nogil:
    """A string as it stands between its quotes."""
    cdef const uint8_t *at
    if not _take(scan, 34):
        return False
    at = _span_end(scan.at, scan.end, escaped)
    if at == NULL:
        return False
    first[0] = scan.at
    size[0] = at - scan.at
    scan.at = at + 1
    return True


cdef int _hex4(const uint8_t *at) noexcept nogil:
    cdef int value = 0
    cdef int index
    cdef uint8_t byte
    for index in range(4):
        byte = at[index]
        if 48 <= byte <= 57:
            value = value * 16 + byte - 48
        elif 97 <= (byte | 32) <= 102:
            value = value * 16 + (byte | 32) - 87
        else:
            return -1
    return value


cdef extern from *:
    """
    /* Copies up to a backslash or the end; how many bytes. There is room for all up to the end. */
    static inline size_t copy_plain(uint8_t *out, const uint8_t *at, const uint8_t *end) {
        const uint8_t *first = at;
    #ifdef __SSE2__
        const __m128i slash = _mm_set1_epi8(92);
        for (; end - at >= 16; at += 16, out += 16) {
            __m128i some = _mm_loadu_si128((const __m128i *)at);
            int mask = _mm_movemask_epi8(_mm_cmpeq_epi8(some, slash));
            _mm_storeu_si128((__m128i *)out, some);
            if (mask)
                return at + __builtin_ctz(mask) - first;
        }
    #endif
        while (at < end && *at != 92)
            *out++ = *at++;
        return at - first;
    }
    """
    size_t copy_plain(uint8_t *out, const uint8_t *at, const uint8_t *end) noexcept nogil


cdef Py_ssize_t _unescape(const uint8_t *at, Py_ssize_t size, uint8_t *out) noexcept nogil:
    """UTF-8 of an escaped string into `out` (never longer than the source); -1 if unusual."""
    cdef const uint8_t *end = at + size
    cdef uint8_t *begin = out
    cdef uint8_t byte
    cdef int unit, low
    cdef size_t plain
    while True:
        # What is written so far is not longer than what was read: there is room for the rest.
        plain = copy_plain(out, at, end)
        at += plain
        out += plain
        if at == end:
            break
        at += 1
        if end - at >= 5 and memcmp(at, <const char *>"u000", 4) == 0 and 48 <= at[4] <= 57:
            out[0] = at[4] - 48  # nearly always: what parts the pairs of properties
            out += 1
            at += 5
            continue
        byte = at[0]  # a span never ends behind a backslash
        at += 1
        if byte == 117:
            if end - at < 4:
                return -1
            unit = _hex4(at)
            at += 4
            if unit < 0:
                return -1
            if 0xD800 <= unit < 0xE000:
                if unit >= 0xDC00 or end - at < 6 or at[0] != 92 or at[1] != 117:
                    return -1
                low = _hex4(at + 2)
                if low < 0xDC00 or low >= 0xE000:
                    return -1
                at += 6
                unit = 0x10000 + ((unit - 0xD800) << 10) + (low - 0xDC00)
                out[0] = <uint8_t>(0xF0 | (unit >> 18))
                out[1] = <uint8_t>(0x80 | ((unit >> 12) & 0x3F))
                out[2] = <uint8_t>(0x80 | ((unit >> 6) & 0x3F))
                out[3] = <uint8_t>(0x80 | (unit & 0x3F))
                out += 4
            elif unit >= 0x800:
                out[0] = <uint8_t>(0xE0 | (unit >> 12))
                out[1] = <uint8_t>(0x80 | ((unit >> 6) & 0x3F))
                out[2] = <uint8_t>(0x80 | (unit & 0x3F))
                out += 3
            elif unit >= 0x80:
                out[0] = <uint8_t>(0xC0 | (unit >> 6))
                out[1] = <uint8_t>(0x80 | (unit & 0x3F))
                out += 2
            else:
                out[0] = <uint8_t>unit
                out += 1
            continue
        if byte == 110:
            byte = 10
        elif byte == 116:
            byte = 9
        elif byte == 114:
            byte = 13
        elif byte == 98:
            byte = 8
        elif byte == 102:
            byte = 12
        elif byte != 34 and byte != 92 and byte != 47:
            return -1
        out[0] = byte
        out += 1
    return out - begin


cdef str _take_text(Scan *scan):
    """A string; None when it is not there or unusual (broken UTF-8, lone surrogates ...)."""
    cdef const uint8_t *first = NULL
    cdef Py_ssize_t size = 0
    cdef bint escaped = False
    cdef uint8_t *plain
    if not _take_span(scan, &first, &size, &escaped):
        return None
    if not escaped:
        return _strict_text(first, size)
    plain = <uint8_t *>PyMem_Malloc(size)
    if plain == NULL:
        raise MemoryError
    try:
        size = _unescape(first, size, plain)
        return _strict_text(plain, size) if size >= 0 else None
    finally:
        PyMem_Free(plain)


cdef bint _is_utf8(const uint8_t *at, Py_ssize_t size):
    return _strict_text(at, size) is not None


cdef uint32_t _checksum(const uint8_t *at, Py_ssize_t size) noexcept nogil:
    return crc_of(at, size)


cdef str _strict_text(const uint8_t *at, Py_ssize_t size):
    cdef PyObject *text = decode_utf8(<const char *>at, size, NULL)
    if text == NULL:
        PyErr_Clear()
        return None
    found = <str>text
    Py_DECREF(found)
    return found


cdef dict _take_ext(Scan *scan):
    cdef dict ext = {}
    cdef str name, value
    cdef uint8_t byte
    cdef const uint8_t *first
    cdef int64_t number = 0
    if not _take(scan, 123):
        return None
    if _take(scan, 125):
        return ext
    while True:
        if _peek(scan) != 34:
            return None
        name = _take_text(scan)
        if name is None or not _take(scan, 58):
            return None
        byte = _peek(scan)
        if byte == 34:
            value = _take_text(scan)
            if value is None:
                return None
        elif byte == 45 or 48 <= byte <= 57:
            first = scan.at
            if not _take_int(scan, &number):
                return None
            value = _text(first, scan.at - first)
        elif _take_word(scan, "true", 4):
            value = "true"
        elif _take_word(scan, "false", 5):
            value = "false"
        else:
            return None
        ext[name] = value
        byte = _peek(scan)
        scan.at += 1
        if byte == 125:
            return ext
        if byte != 44:
            return None


cdef bint _is(const uint8_t *name, Py_ssize_t size, const char *word, Py_ssize_t word_size) noexcept nogil:
    return size == word_size and memcmp(name, word, size) == 0


cdef _decode_json(bytes data):
    """The header in the shape every client writes; None for anything else."""
    cdef Scan scan
    cdef const uint8_t *name = NULL
    cdef const uint8_t *word = NULL
    cdef Py_ssize_t size = 0
    cdef Py_ssize_t word_size = 0
    cdef bint escaped = False
    cdef bint has_code = False
    cdef uint8_t byte
    cdef int64_t code = 0
    cdef int64_t language = 0
    cdef int64_t version = 0
    cdef int64_t opaque = 0
    cdef int64_t flag = 0
    cdef str remark = None
    cdef dict ext = None
    scan.at = <const uint8_t *>PyBytes_AS_STRING(data)
    scan.end = scan.at + PyBytes_GET_SIZE(data)
    if not _take(&scan, 123):
        return None
    while True:
        if not _take_span(&scan, &name, &size, &escaped) or escaped or not _take(&scan, 58):
            return None
        byte = _peek(&scan)
        if _is(name, size, "code", 4):
            has_code = True
            if not _take_int32(&scan, &code):
                return None
        elif _is(name, size, "opaque", 6):
            if not _take_int32(&scan, &opaque):
                return None
        elif _is(name, size, "flag", 4):
            if not _take_int32(&scan, &flag):
                return None
        elif _is(name, size, "version", 7):
            if not _take_int32(&scan, &version):
                return None
        elif _is(name, size, "extFields", 9):
            if byte == 110:
                if not _take_word(&scan, "null", 4):
                    return None
                ext = None
            else:
                ext = _take_ext(&scan)
                if ext is None:
                    return None
        elif _is(name, size, "language", 8):
            if byte != 34:
                if not _take_int32(&scan, &language):
                    return None
                if not 0 <= language < LANGUAGE_COUNT:
                    language = LANGUAGE_OTHER
            else:
                if not _take_span(&scan, &word, &word_size, &escaped) or escaped:
                    return None
                found = _language_codes.get(word[:word_size])
                if found is None:
                    return None
                language = found
        elif _is(name, size, "remark", 6):
            if byte == 110:
                if not _take_word(&scan, "null", 4):
                    return None
                remark = None
            else:
                remark = _take_text(&scan)
                if remark is None:
                    return None
        elif _is(name, size, "serializeTypeCurrentRPC", 23):
            if not _take_span(&scan, &word, &word_size, &escaped) or escaped:
                return None
            if _strict_text(word, word_size) is None:
                return None
        else:
            return None
        byte = _peek(&scan)
        scan.at += 1
        if byte == 125:
            break
        if byte != 44:
            return None
    while scan.at < scan.end and _blank(scan.at[0]):
        scan.at += 1
    if not has_code or scan.at != scan.end:
        return None
    return (
        code,
        language,
        version,
        opaque,
        flag,
        remark if remark else None,
        ext if ext is not None else {},
    )


def encode_header(int serialize, code, language, version, opaque, flag, remark, ext):
    cdef int64_t numbers[5]
    out = None
    try:
        numbers[0] = code
        numbers[1] = language
        numbers[2] = version
        numbers[3] = opaque
        numbers[4] = flag
        if serialize == SERIALIZE_JSON:
            out = _encode_json(numbers, remark, ext)
        elif serialize == SERIALIZE_BINARY:
            out = _encode_binary(numbers, remark, ext)
    except (OverflowError, UnicodeEncodeError, TypeError):
        out = None
    if out is not None:
        return out
    return pure.encode_header(serialize, code, language, version, opaque, flag, remark, ext)


cdef inline bint _fits32(int64_t value) noexcept nogil:
    return -0x80000000LL <= value <= 0x7FFFFFFFLL


cdef struct Out:
    uint8_t *data
    Py_ssize_t size
    Py_ssize_t room


cdef int _reserve(Out *out, Py_ssize_t more) except -1:
    cdef Py_ssize_t room
    cdef uint8_t *data
    if out.room - out.size >= more:
        return 0
    room = (out.size + more) * 2
    data = <uint8_t *>PyMem_Realloc(out.data, room)
    if data == NULL:
        raise MemoryError
    out.data = data
    out.room = room
    return 0


cdef int _add(Out *out, const char *data, Py_ssize_t size) except -1:
    _reserve(out, size)
    memcpy(out.data + out.size, data, size)
    out.size += size
    return 0


cdef int _add_number(Out *out, int64_t value) except -1:
    cdef char digits[24]
    cdef int at = 24
    cdef bint negative = value < 0
    cdef uint64_t rest = <uint64_t>-value if negative else <uint64_t>value
    while True:
        at -= 1
        digits[at] = <char>(48 + rest % 10)
        rest //= 10
        if rest == 0:
            break
    if negative:
        at -= 1
        digits[at] = 45
    return _add(out, digits + at, 24 - at)


cdef int _add_text(Out *out, str text) except -1:
    """A JSON string. The room for the worst case is taken first: six bytes for one."""
    cdef Py_ssize_t size = 0
    cdef const char *data = PyUnicode_AsUTF8AndSize(text, &size)
    cdef Py_ssize_t index
    cdef uint8_t byte
    cdef uint8_t *at
    cdef const char *digits = "0123456789abcdef"
    _reserve(out, size * 6 + 2)
    at = out.data + out.size
    at[0] = 34
    at += 1
    for index in range(size):
        byte = <uint8_t>data[index]
        if byte >= 32 and byte != 34 and byte != 92:
            at[0] = byte
            at += 1
            continue
        at[0] = 92
        if byte == 34 or byte == 92:
            at[1] = byte
        elif byte == 10:
            at[1] = 110
        elif byte == 9:
            at[1] = 116
        elif byte == 13:
            at[1] = 114
        elif byte == 8:
            at[1] = 98
        elif byte == 12:
            at[1] = 102
        else:
            at[1] = 117
            at[2] = 48
            at[3] = 48
            at[4] = digits[byte >> 4]
            at[5] = digits[byte & 15]
            at += 4
        at += 2
    at[0] = 34
    out.size = at + 1 - out.data
    return 0


cdef _encode_json(const int64_t *numbers, remark, ext):
    cdef Out out
    cdef bint first = True
    cdef bytes language
    if not (_fits32(numbers[0]) and _fits32(numbers[2])):
        return None
    if not (_fits32(numbers[3]) and _fits32(numbers[4])):
        return None
    if not (ext is None or type(ext) is dict) or not (remark is None or type(remark) is str):
        return None
    language = _language_names[
        numbers[1] if 0 <= numbers[1] < LANGUAGE_COUNT else LANGUAGE_OTHER
    ]
    out.data = <uint8_t *>PyMem_Malloc(512)
    out.size = 0
    out.room = 512
    if out.data == NULL:
        raise MemoryError
    try:
        _add(&out, b'{"code":', 8)
        _add_number(&out, numbers[0])
        if ext is not None:
            _add(&out, b',"extFields":{', 14)
            for name, value in (<dict>ext).items():
                if type(name) is not str or type(value) is not str:
                    return None
                if first:
                    first = False
                else:
                    _add(&out, b",", 1)
                _add_text(&out, <str>name)
                _add(&out, b":", 1)
                _add_text(&out, <str>value)
            _add(&out, b"}", 1)
        _add(&out, b',"flag":', 8)
        _add_number(&out, numbers[4])
        _add(&out, b',"language":"', 13)
        _add(&out, PyBytes_AS_STRING(language), PyBytes_GET_SIZE(language))
        _add(&out, b'","opaque":', 11)
        _add_number(&out, numbers[3])
        if remark is not None:
            _add(&out, b',"remark":', 10)
            _add_text(&out, <str>remark)
        _add(&out, b',"serializeTypeCurrentRPC":"JSON","version":', 44)
        _add_number(&out, numbers[2])
        _add(&out, b"}", 1)
        return PyBytes_FromStringAndSize(<char *>out.data, out.size)
    finally:
        PyMem_Free(out.data)


cdef _encode_binary(const int64_t *numbers, remark, ext):
    cdef Py_ssize_t remark_bytes = 0
    cdef Py_ssize_t ext_bytes = 0
    cdef Py_ssize_t size = 0
    cdef const char *said = NULL
    cdef const char *text
    cdef bytes out
    cdef uint8_t *at
    cdef int64_t language = numbers[1]
    if not (-0x8000 <= numbers[0] <= 0x7FFF and -0x8000 <= numbers[2] <= 0x7FFF):
        return None
    if not (_fits32(numbers[3]) and _fits32(numbers[4])):
        return None
    if not (ext is None or type(ext) is dict) or not (remark is None or type(remark) is str):
        return None
    if not 0 <= language < LANGUAGE_COUNT:
        language = LANGUAGE_OTHER
    if remark is not None:
        said = PyUnicode_AsUTF8AndSize(remark, &remark_bytes)
    if ext is not None:
        # The UTF-8 form of a text is kept by the text itself, so asking twice costs nothing.
        for name, value in (<dict>ext).items():
            if type(name) is not str or type(value) is not str:
                return None
            PyUnicode_AsUTF8AndSize(name, &size)
            if size > 0x7FFF:
                return None
            ext_bytes += size + 6
            PyUnicode_AsUTF8AndSize(value, &size)
            ext_bytes += size
    if ext_bytes > 0x7FFFFFFF or remark_bytes > 0x7FFFFFFF:
        return None
    out = PyBytes_FromStringAndSize(NULL, BINARY_HEADER_BYTES + remark_bytes + 4 + ext_bytes)
    at = <uint8_t *>PyBytes_AS_STRING(out)
    at = _put16(at, <uint32_t>numbers[0])
    at[0] = <uint8_t>language
    at = _put16(at + 1, <uint32_t>numbers[2])
    at = _put32(at, <uint32_t>numbers[3])
    at = _put32(at, <uint32_t>numbers[4])
    at = _put32(at, <uint32_t>remark_bytes)
    at = _put(at, said, remark_bytes)
    at = _put32(at, <uint32_t>ext_bytes)
    if ext is not None:
        for name, value in (<dict>ext).items():
            text = PyUnicode_AsUTF8AndSize(name, &size)
            at = _put(_put16(at, <uint32_t>size), text, size)
            text = PyUnicode_AsUTF8AndSize(value, &size)
            at = _put(_put32(at, <uint32_t>size), text, size)
    return out


# --- hash ----------------------------------------------------------------------------------


def java_hash(str text not None):
    return _java_hash(text)


cdef int32_t _java_hash(str text):
    cdef int kind = PyUnicode_KIND(text)
    cdef void *data = PyUnicode_DATA(text)
    cdef Py_ssize_t size = PyUnicode_GET_LENGTH(text)
    cdef Py_ssize_t index
    cdef uint32_t value = 0
    cdef uint32_t point
    for index in range(size):
        point = PyUnicode_READ(kind, data, index)
        if point >= 0x10000:
            value = 31 * value + (0xD7C0 + (point >> 10))
            point = 0xDC00 | (point & 0x3FF)
        value = 31 * value + point
    return <int32_t>value


def key_hash(str topic not None, str key not None):
    return _key_hash(topic, key)


cdef int32_t _key_hash(str topic, str key):
    return _absolute(_java_hash(f"{topic}#{key}"))


cdef inline int32_t _absolute(int32_t value) noexcept nogil:
    if value >= 0:
        return value
    return 0 if value == -0x7FFFFFFF - 1 else -value


# --- record --------------------------------------------------------------------------------


cdef inline bytes _as_bytes(data):
    return data if PyBytes_CheckExact(data) else bytes(memoryview(data))


def encode_record(
    bytearray out not None,
    log_offset,
    queue_offset,
    store_ms,
    topic,
    queue_id,
    flag,
    sys_flag,
    born_ms,
    born_host,
    store_host,
    reconsume_times,
    prepared_offset,
    body,
    properties,
):
    cdef bytes topic_data = _as_bytes(topic)
    cdef bytes born_data = _as_bytes(born_host)
    cdef bytes store_data = _as_bytes(store_host)
    cdef bytes body_data = _as_bytes(body)
    cdef bytes properties_data = _as_bytes(properties)
    cdef Py_ssize_t topic_bytes = PyBytes_GET_SIZE(topic_data)
    cdef Py_ssize_t born_bytes = PyBytes_GET_SIZE(born_data)
    cdef Py_ssize_t store_bytes = PyBytes_GET_SIZE(store_data)
    cdef Py_ssize_t body_bytes = PyBytes_GET_SIZE(body_data)
    cdef Py_ssize_t properties_bytes = PyBytes_GET_SIZE(properties_data)
    cdef Py_ssize_t size, before
    cdef int64_t c_log_offset, c_queue_offset, c_store_ms, c_born_ms, c_prepared_offset
    cdef int32_t c_queue_id, c_flag, c_sys_flag, c_reconsume_times
    cdef uint32_t crc
    cdef uint8_t *at
    if born_bytes != HOST_V4_BYTES and born_bytes != HOST_V6_BYTES:
        raise ValueError(f"born host of {born_bytes} bytes; expected 8 or 20")
    if store_bytes != HOST_V4_BYTES and store_bytes != HOST_V6_BYTES:
        raise ValueError(f"store host of {store_bytes} bytes; expected 8 or 20")
    if topic_bytes > TOPIC_BYTES_MAX:
        raise MessageTooLarge(f"topic of {topic_bytes} bytes; at most {TOPIC_BYTES_MAX} fit")
    if properties_bytes > PROPERTIES_BYTES_MAX:
        raise MessageTooLarge(
            f"properties of {properties_bytes} bytes; at most {PROPERTIES_BYTES_MAX} fit,"
            " shorten keys, tags or user properties"
        )
    size = (
        RECORD_BYTES_MIN - 2 * HOST_V4_BYTES
        + born_bytes + store_bytes + body_bytes + topic_bytes + properties_bytes
    )
    try:
        c_log_offset = log_offset
        c_queue_offset = queue_offset
        c_store_ms = store_ms
        c_born_ms = born_ms
        c_prepared_offset = prepared_offset
        c_queue_id = queue_id
        c_flag = flag
        c_sys_flag = sys_flag
        c_reconsume_times = reconsume_times
        if size > 0x7FFFFFFF:
            raise OverflowError(f"record of {size} bytes")
    except OverflowError as error:
        raise ValueError(f"a record field does not fit: {error}") from None
    c_sys_flag &= ~(SYS_BORN_V6 | SYS_STORE_V6)
    if born_bytes == HOST_V6_BYTES:
        c_sys_flag |= SYS_BORN_V6
    if store_bytes == HOST_V6_BYTES:
        c_sys_flag |= SYS_STORE_V6
    crc = crc_of(<const uint8_t *>PyBytes_AS_STRING(body_data), body_bytes)
    before = PyByteArray_GET_SIZE(out)
    PyByteArray_Resize(out, before + size)
    at = <uint8_t *>PyByteArray_AS_STRING(out) + before
    at = _put32(at, <uint32_t>size)
    at = _put32(at, <uint32_t>MAGIC_RECORD)
    at = _put32(at, crc & CRC_MASK)
    at = _put32(at, <uint32_t>c_queue_id)
    at = _put32(at, <uint32_t>c_flag)
    at = _put64(at, <uint64_t>c_queue_offset)
    at = _put64(at, <uint64_t>c_log_offset)
    at = _put32(at, <uint32_t>c_sys_flag)
    at = _put64(at, <uint64_t>c_born_ms)
    at = _put(at, PyBytes_AS_STRING(born_data), born_bytes)
    at = _put64(at, <uint64_t>c_store_ms)
    at = _put(at, PyBytes_AS_STRING(store_data), store_bytes)
    at = _put32(at, <uint32_t>c_reconsume_times)
    at = _put64(at, <uint64_t>c_prepared_offset)
    at = _put32(at, <uint32_t>body_bytes)
    at = _put(at, PyBytes_AS_STRING(body_data), body_bytes)
    at[0] = <uint8_t>topic_bytes
    at = _put(at + 1, PyBytes_AS_STRING(topic_data), topic_bytes)
    at = _put16(at, <uint32_t>properties_bytes)
    _put(at, PyBytes_AS_STRING(properties_data), properties_bytes)
    return size


cdef struct Fields:
    int64_t log_offset
    int64_t queue_offset
    int64_t store_ms
    int32_t queue_id
    int32_t sys_flag
    const uint8_t *topic
    Py_ssize_t topic_bytes
    const uint8_t *properties
    Py_ssize_t properties_bytes


def walk(view, int64_t base, start, end, bint check_crc, Py_ssize_t limit, int64_t whole_ms=0):
    cdef Py_buffer buffer
    cdef list entries = []
    cdef Py_ssize_t at, stop, size
    cdef const uint8_t *data
    cdef Fields fields
    cdef int why
    if not 0 <= start <= end <= len(view):
        raise ValueError(f"walk from {start} to {end} outside a view of {len(view)} bytes")
    at = start
    stop = end
    PyObject_GetBuffer(view, &buffer, PyBUF_SIMPLE)
    try:
        data = <const uint8_t *>buffer.buf
        while at < stop and len(entries) < limit:
            why = _record(data, base, at, stop, check_crc, whole_ms, &fields, &size)
            if why != MORE:
                return entries, at, why
            entries.append(_entry(&fields, size))
            at += size
        return entries, at, MORE
    finally:
        PyBuffer_Release(&buffer)


cdef int _record(
    const uint8_t *view, int64_t base, Py_ssize_t at, Py_ssize_t stop, bint check_crc,
    int64_t whole_ms, Fields *fields, Py_ssize_t *size_out,
) noexcept nogil:
    """The record at `at`, all of it before `stop`: WALK_MORE, or why there is none."""
    cdef const uint8_t *data = view + at
    cdef Py_ssize_t store_at, body_at, body_bytes, topic_at, topic_bytes, properties_at
    cdef Py_ssize_t topic_width, size, index
    cdef int32_t magic, sys_flag
    if stop - at < 8:
        for index in range(at, stop):
            if view[index]:
                return CORRUPT
        return EMPTY
    size = _i32(data)
    magic = _i32(data + 4)
    if magic == MAGIC_BLANK and size >= 8:
        return BLANK
    if size == 0 and magic == 0:
        return EMPTY
    if size > stop - at:
        return CORRUPT
    if size < RECORD_BYTES_MIN or (magic != MAGIC_RECORD and magic != MAGIC_RECORD_V2):
        return CORRUPT
    fields.log_offset = _i64(data + 28)
    if <uint64_t>fields.log_offset != <uint64_t>base + <uint64_t>at:
        return CORRUPT
    sys_flag = _i32(data + 36)
    store_at = HEAD_BYTES + (HOST_V6_BYTES if sys_flag & SYS_BORN_V6 else HOST_V4_BYTES)
    body_at = (
        store_at + 8 + (HOST_V6_BYTES if sys_flag & SYS_STORE_V6 else HOST_V4_BYTES)
        + MIDDLE_BYTES
    )
    topic_width = 1 if magic == MAGIC_RECORD else 2
    if body_at + topic_width + 2 > size:
        return CORRUPT
    body_bytes = _i32(data + body_at - 4)
    if body_bytes < 0 or body_bytes > size - body_at - topic_width - 2:
        return CORRUPT
    topic_at = body_at + body_bytes + topic_width
    if topic_width == 1:
        topic_bytes = <signed char>data[topic_at - 1]
    else:
        topic_bytes = _i16(data + topic_at - 2)
    if topic_bytes < 0 or topic_bytes > size - topic_at - 2:
        return CORRUPT
    properties_at = topic_at + topic_bytes + 2
    if _i16(data + properties_at - 2) != size - properties_at:
        return CORRUPT
    fields.store_ms = _i64(data + store_at)
    if check_crc:
        if <int32_t>(crc_of(data + body_at, body_bytes) & CRC_MASK) != _i32(data + 8):
            return CORRUPT
        if topic_bytes and memchr(data + topic_at, 0, topic_bytes) != NULL:
            return CORRUPT
        if fields.store_ms >= whole_ms and _lost_sector(view, at + properties_at, at + size):
            return CORRUPT
    fields.queue_id = _i32(data + 12)
    fields.queue_offset = _i64(data + 20)
    fields.sys_flag = sys_flag
    fields.topic = data + topic_at
    fields.topic_bytes = topic_bytes
    fields.properties = data + properties_at
    fields.properties_bytes = size - properties_at
    size_out[0] = size
    return MORE


cdef bint _lost_sector(const uint8_t *view, Py_ssize_t start, Py_ssize_t end) noexcept nogil:
    cdef Py_ssize_t sector = (start + SECTOR_BYTES - 1) // SECTOR_BYTES * SECTOR_BYTES
    cdef Py_ssize_t at, sector_end
    while sector < end:
        sector_end = sector + SECTOR_BYTES if sector + SECTOR_BYTES < end else end
        at = sector
        while at < sector_end and view[at] == 0:
            at += 1
        if at == sector_end:
            return True
        sector = sector_end
    return False


cdef tuple _entry(Fields *fields, Py_ssize_t size):
    cdef Facts facts
    cdef list keys = []
    cdef const uint8_t *at
    cdef const uint8_t *end
    cdef const uint8_t *word_end
    _read_facts(fields.properties, fields.properties_bytes, &facts)
    if facts.unique != NULL:
        keys.append(_text(facts.unique, facts.unique_bytes))
    if facts.words != NULL:
        at = facts.words
        end = at + facts.words_bytes
        while at < end:
            word_end = _word_end(at, end)
            if word_end > at:
                keys.append(_text(at, word_end - at))
            at = word_end + 1
    return (
        fields.log_offset,
        size,
        _text(fields.topic, fields.topic_bytes),
        fields.queue_id,
        fields.queue_offset,
        fields.sys_flag,
        fields.store_ms,
        _tags_code(&facts),
        facts.level,
        tuple(keys),
    )


cdef extern from *:
    """
    /* Carries Java's hash on over bytes, 16 at a time: by pairs, by fours, then as a polynomial of
       31 to the power of 4. Whether all bytes were ASCII. */
    static inline int hash_ascii(uint32_t *state, const uint8_t *at, size_t size) {
        uint32_t value = *state;
        unsigned seen = 0;
    #ifdef __SSE2__
        const __m128i zero = _mm_setzero_si128();
        const __m128i ones = _mm_set1_epi32(31 | 1 << 16), twos = _mm_set1_epi32(961 | 1 << 16);
        int high = 0;
        for (; size >= 16; at += 16, size -= 16) {
            __m128i some = _mm_loadu_si128((const __m128i *)at);
            __m128i front = _mm_madd_epi16(_mm_unpacklo_epi8(some, zero), ones);
            __m128i back = _mm_madd_epi16(_mm_unpackhi_epi8(some, zero), ones);
            uint32_t four[4];
            _mm_storeu_si128((__m128i *)four, _mm_madd_epi16(_mm_packs_epi32(front, back), twos));
            high |= _mm_movemask_epi8(some);
            value = value * 923521u + four[0];
            value = value * 923521u + four[1];
            value = value * 923521u + four[2];
            value = value * 923521u + four[3];
        }
        if (high)
            seen = 0x80;
    #endif
        for (; size >= 4; at += 4, size -= 4) {
            seen |= at[0] | at[1] | at[2] | at[3];
            value = value * 923521u + at[0] * 29791u + at[1] * 961u + at[2] * 31u + at[3];
        }
        for (; size; at++, size--) {
            seen |= *at;
            value = value * 31u + *at;
        }
        *state = value;
        return seen < 0x80;
    }
    """
    bint hash_ascii(uint32_t *state, const uint8_t *at, size_t size) noexcept nogil


cdef int64_t _tags_code(Facts *facts) except? -1:
    cdef uint32_t state = 0
    if facts.tags == NULL:
        return 0
    if hash_ascii(&state, facts.tags, facts.tags_bytes):
        return <int32_t>state
    return _java_hash(_text(facts.tags, facts.tags_bytes))


cdef inline const uint8_t *_word_end(const uint8_t *at, const uint8_t *end) noexcept nogil:
    cdef const uint8_t *found = <const uint8_t *>memchr(at, 32, end - at)
    return found if found != NULL else end


cdef void _read_facts(const uint8_t *at, Py_ssize_t size, Facts *facts) noexcept nogil:
    """Where tags and keys lie in a properties text, and the delay level."""
    cdef const uint8_t *end = at + size
    cdef const uint8_t *pair_end
    cdef const uint8_t *value
    cdef Py_ssize_t name_bytes, value_bytes
    facts.tags = facts.words = facts.unique = NULL
    facts.tags_bytes = facts.words_bytes = facts.unique_bytes = 0
    facts.level = 0
    while at < end:
        pair_end = <const uint8_t *>memchr(at, 2, end - at)
        if pair_end == NULL:
            pair_end = end
        if pair_end > at:
            value = <const uint8_t *>memchr(at, 1, pair_end - at)
            if value != NULL:
                name_bytes = value - at
                value += 1
                value_bytes = pair_end - value
                if value_bytes > 0:
                    if _is(at, name_bytes, "TAGS", 4):
                        facts.tags = value
                        facts.tags_bytes = value_bytes
                    elif _is(at, name_bytes, "KEYS", 4):
                        facts.words = value
                        facts.words_bytes = value_bytes
                    elif _is(at, name_bytes, "UNIQ_KEY", 8):
                        facts.unique = value
                        facts.unique_bytes = value_bytes
                    elif _is(at, name_bytes, "DELAY", 5):
                        facts.level = _level(value, value_bytes)
        at = pair_end + 1


cdef int32_t _level(const uint8_t *at, Py_ssize_t size) noexcept nogil:
    cdef int64_t level = 0
    cdef Py_ssize_t index
    if size and at[0] == 43:
        at += 1
        size -= 1
    if size < 1 or size > 10:
        return 0
    for index in range(size):
        if not 48 <= at[index] <= 57:
            return 0
        level = level * 10 + (at[index] - 48)
    return <int32_t>level if level <= 0x7FFFFFFF else 0


# --- many records at once ------------------------------------------------------------------


cdef enum:
    NEAR = 16


cdef struct Near:
    const uint8_t *topic
    Py_ssize_t topic_bytes
    int32_t queue_id
    PyObject *run  # kept alive by the table of all


cdef class _Run:
    """A queue while records are gathered, and its run of entries under way."""

    cdef str topic
    cdef int32_t queue_id
    cdef uint32_t prefix  # hash of "topic#"
    cdef bint delayed
    cdef int64_t expected
    cdef bytearray data


cdef _Run _run_of(dict by_bytes, dict by_name, bytes place, Fields *fields):
    cdef str topic = _text(fields.topic, fields.topic_bytes)
    cdef tuple name = (topic, fields.queue_id)
    cdef _Run run = by_name.get(name)
    if run is None:
        run = _Run()
        run.topic = topic
        run.queue_id = fields.queue_id
        run.prefix = _prefix(topic)
        run.delayed = topic == pure.SCHEDULE_TOPIC
        by_name[name] = run
    by_bytes[place] = run
    return run


cdef uint32_t _prefix(str topic) except? 0:
    """The hash that all keys of a topic begin with."""
    return <uint32_t>_java_hash(topic + "#")


cdef Py_ssize_t _keys_max(Facts *facts) noexcept nogil:
    """How many keys there can be at most."""
    return (facts.unique != NULL) + (facts.words_bytes + 1) // 2


cdef uint8_t *_put_keys(
    uint8_t *to, PyObject *topic, uint32_t prefix, Facts *facts, int64_t log_offset,
    int64_t store_ms,
) except NULL:
    """Pack the INDEX_KEYs of a record: its unique key, then its words.

    The topic is only looked at for keys that are not ASCII. It is a bare pointer because to count a
    reference to it means to have it in the cache, which with many topics is a wait for each record.
    """
    cdef const uint8_t *word = facts.words
    cdef const uint8_t *words_end = word + facts.words_bytes
    cdef const uint8_t *word_end
    if facts.unique != NULL:
        to = _put_key(to, topic, prefix, facts.unique, facts.unique_bytes, log_offset, store_ms)
    while word < words_end:
        word_end = _word_end(word, words_end)
        if word_end > word:
            to = _put_key(to, topic, prefix, word, word_end - word, log_offset, store_ms)
        word = word_end + 1
    return to


cdef uint8_t *_put_key(
    uint8_t *to, PyObject *topic, uint32_t prefix, const uint8_t *at, Py_ssize_t size,
    int64_t log_offset, int64_t store_ms,
) except NULL:
    cdef uint32_t state = prefix
    cdef int32_t hashed
    if hash_ascii(&state, at, size):
        hashed = _absolute(<int32_t>state)
    else:
        hashed = _key_hash(<str>topic, _text(at, size))
    to = _put32(to, <uint32_t>hashed)
    to = _put64(to, <uint64_t>log_offset)
    return _put64(to, <uint64_t>store_ms)


cdef inline uint8_t *_grow(bytearray data, Py_ssize_t more) except NULL:
    cdef Py_ssize_t before = PyByteArray_GET_SIZE(data)
    PyByteArray_Resize(data, before + more)
    return <uint8_t *>PyByteArray_AS_STRING(data) + before


cdef extern from *:
    """
    static inline int byte_array_has_room(PyObject *data, Py_ssize_t more) {
        const PyByteArrayObject *array = (const PyByteArrayObject *)data;
        return array->ob_start - array->ob_bytes + Py_SIZE(array) + more < array->ob_alloc;
    }
    static inline const char *byte_array_end(PyObject *data) {
        return ((const PyByteArrayObject *)data)->ob_start + Py_SIZE(data);
    }
    """
    bint byte_array_has_room(PyObject *data, Py_ssize_t more) noexcept
    const char *byte_array_end(PyObject *data) noexcept


cdef inline uint8_t *_grow_much(bytearray data, Py_ssize_t more) except NULL:
    """Like `_grow`, for what will grow on: by half, where Python would move it with every eighth.

    Python keeps the room when the size is set to more than half of it.
    """
    cdef Py_ssize_t size = PyByteArray_GET_SIZE(data) + more
    if not byte_array_has_room(<PyObject *>data, more):
        PyByteArray_Resize(data, size + size // 2)
    PyByteArray_Resize(data, size)
    return <uint8_t *>PyByteArray_AS_STRING(data) + size - more


def gather(view, int64_t base, start, end, bint check_crc, Py_ssize_t limit, int64_t whole_ms=0):
    cdef Py_buffer buffer
    cdef Py_ssize_t at, stop, size
    cdef Py_ssize_t count = 0
    cdef int64_t last_ms = 0
    cdef int why = MORE
    cdef int32_t kind
    cdef const uint8_t *data
    cdef Py_ssize_t before
    cdef uint8_t *to
    cdef uint8_t *end_of_keys
    cdef Fields fields
    cdef Facts facts
    cdef bytes place
    cdef _Run run = None
    cdef Near near[NEAR]  # runs that were met lately
    cdef Near *met
    cdef dict by_bytes = {}
    cdef dict by_name = {}
    cdef list runs = []
    cdef list delayed = []
    cdef bytearray keys = bytearray()
    if not 0 <= start <= end <= len(view):
        raise ValueError(f"walk from {start} to {end} outside a view of {len(view)} bytes")
    at = start
    stop = end
    memset(near, 0, sizeof(near))
    PyObject_GetBuffer(view, &buffer, PyBUF_SIMPLE)
    try:
        data = <const uint8_t *>buffer.buf
        while at < stop and count < limit:
            why = _record(data, base, at, stop, check_crc, whole_ms, &fields, &size)
            if why != MORE:
                break
            met = &near[fields.queue_id & (NEAR - 1)]
            if (
                met.topic != NULL and fields.queue_id == met.queue_id
                and fields.topic_bytes == met.topic_bytes
                and memcmp(fields.topic, met.topic, met.topic_bytes) == 0
            ):
                run = <_Run>met.run
            else:
                place = PyBytes_FromStringAndSize(NULL, fields.topic_bytes + 4)
                to = <uint8_t *>PyBytes_AS_STRING(place)
                to = _put32(to, <uint32_t>fields.queue_id)
                _put(to, fields.topic, fields.topic_bytes)
                run = by_bytes.get(place)
                if run is None:
                    run = _run_of(by_bytes, by_name, place, &fields)
                met.topic = fields.topic
                met.topic_bytes = fields.topic_bytes
                met.queue_id = fields.queue_id
                met.run = <PyObject *>run
            _read_facts(fields.properties, fields.properties_bytes, &facts)
            kind = fields.sys_flag & SYS_TRANSACTION_MASK
            if kind != SYS_ROLLBACK:
                before = PyByteArray_GET_SIZE(keys)
                to = _grow(keys, _keys_max(&facts) * INDEX_KEY_BYTES)
                end_of_keys = _put_keys(
                    to, <PyObject *>run.topic, run.prefix, &facts, fields.log_offset,
                    fields.store_ms,
                )
                PyByteArray_Resize(keys, before + (end_of_keys - to))
            if run.delayed:
                delayed.append(_entry(&fields, size))
            elif kind != SYS_PREPARED and kind != SYS_ROLLBACK:
                if run.data is None or run.expected != fields.queue_offset:
                    run.data = bytearray()
                    runs.append((run.topic, run.queue_id, fields.queue_offset, run.data))
                to = _grow(run.data, QUEUE_ENTRY_BYTES)
                to = _put64(to, <uint64_t>fields.log_offset)
                to = _put32(to, <uint32_t>size)
                _put64(to, <uint64_t>_tags_code(&facts))
                run.expected = <int64_t>(<uint64_t>fields.queue_offset + 1)
            last_ms = fields.store_ms
            count += 1
            at += size
    finally:
        PyBuffer_Release(&buffer)
    packed = [(name, number, first, bytes(entries)) for name, number, first, entries in runs]
    return packed, bytes(keys), delayed, count, last_ms, at, why


cdef enum:
    TAILS_AHEAD = 8
    CHAIN_AHEAD = 8
    SIGNED_MAX = 16  # names that are told by their signs


cdef inline int64_t _slot_place(int32_t hashed, int64_t slot_count) noexcept nogil:
    """Where in the table the slot of a hash begins."""
    if hashed >= 0 and slot_count <= 0x7FFFFFFF:
        return 4 * <int64_t>(<uint32_t>hashed % <uint32_t>slot_count)  # far cheaper than 64 bits
    return 4 * ((hashed % slot_count + slot_count) % slot_count)


def chain(
    bytearray slots not None, bytes keys not None, int64_t count, int64_t begin_ms, int64_t limit,
    bytearray out not None, bytearray pages=None,
):
    cdef int64_t slot_count = PyByteArray_GET_SIZE(slots) // 4
    cdef int64_t place
    cdef int64_t places[CHAIN_AHEAD]
    cdef uint8_t *marks = NULL
    cdef Py_ssize_t key_count = PyBytes_GET_SIZE(keys) // INDEX_KEY_BYTES
    cdef Py_ssize_t taken = 0
    cdef Py_ssize_t fresh = 0
    cdef int64_t ahead
    cdef const uint8_t *key = <const uint8_t *>PyBytes_AS_STRING(keys)
    cdef uint8_t *table
    cdef uint8_t *slot
    cdef uint8_t *to
    cdef int32_t hashed, previous
    cdef int64_t store_ms
    cdef uint64_t seconds
    if slot_count == 0:
        raise ValueError("an index file without slots")
    if pages is not None:
        if PyByteArray_GET_SIZE(pages) * SLOT_PAGE_BYTES < PyByteArray_GET_SIZE(slots):
            raise ValueError(f"{len(pages)} page marks for a table of {len(slots)} bytes")
        marks = <uint8_t *>PyByteArray_AS_STRING(pages)
    if key_count > limit - count:
        key_count = limit - count if limit > count else 0
    to = _grow_much(out, key_count * INDEX_ENTRY_BYTES)
    table = <uint8_t *>PyByteArray_AS_STRING(slots)
    # The table is large and its slots are met at random, so they are asked for some keys ahead.
    for ahead in range(min(CHAIN_AHEAD, key_count)):
        places[ahead] = _slot_place(_i32(key + ahead * INDEX_KEY_BYTES), slot_count)
        ask_for(table + places[ahead])
    while taken < key_count:
        hashed = _i32(key)
        store_ms = _i64(key + 12)
        place = places[taken % CHAIN_AHEAD]
        slot = table + place
        if taken + CHAIN_AHEAD < key_count:
            ahead = _slot_place(_i32(key + CHAIN_AHEAD * INDEX_KEY_BYTES), slot_count)
            places[taken % CHAIN_AHEAD] = ahead
            ask_for(table + ahead)
        previous = _i32(slot)
        if not 0 < previous < count:
            previous = 0
            fresh += 1
        seconds = 0
        if store_ms > begin_ms:
            seconds = (<uint64_t>store_ms - <uint64_t>begin_ms) // 1000
            if seconds > 0x7FFFFFFF:
                seconds = 0x7FFFFFFF
        to = _put32(to, <uint32_t>hashed)
        to = _put64(to, <uint64_t>_i64(key + 4))
        to = _put32(to, <uint32_t>seconds)
        to = _put32(to, <uint32_t>previous)
        _put32(slot, <uint32_t>count)
        if marks != NULL:
            marks[place // SLOT_PAGE_BYTES] = 1
        count += 1
        taken += 1
        key += INDEX_KEY_BYTES
    return taken, fresh


# --- what grows ----------------------------------------------------------------------------


cdef inline uint64_t _sign(name) except? 0:
    """One bit of 64 that stands for a name."""
    return <uint64_t>1 << (<uint64_t>hash(name) & 63)


cdef uint64_t _signs(names) except? 0:
    """The bits of all names; all bits when they cannot be told."""
    cdef uint64_t signs = 0
    if type(names) is not set or len(names) > SIGNED_MAX:
        return ~<uint64_t>0
    for name in names:
        signs |= _sign(name)
    return signs


cdef class Place:
    """The offset that the next message of a queue gets."""

    def __cinit__(self, str topic not None, int32_t queue_id, int64_t following):
        self.key = (topic, queue_id)
        self.sign = _sign(topic)
        self.next = following


cdef class Tail:
    """The newest entries of a queue, which are in memory only."""

    def __cinit__(self, owner):
        self.owner = owner
        self.data = bytearray()

    @property
    def end(self):
        return self.at + PyByteArray_GET_SIZE(self.data)


# With thousands of queues none of what a run meets is in a cache, so it is asked for some runs ahead.
# Bare pointers: to count a reference to something means to wait for it.
cdef inline void _ask_for_tail(PyObject *place) noexcept:
    if (<Place>place).tail is not None:
        ask_for(<const uint8_t *><PyObject *>(<Place>place).tail.data)


cdef inline void _ask_for_end(PyObject *place) noexcept:
    cdef PyObject *data
    if (<Place>place).tail is not None:
        data = <PyObject *>(<Place>place).tail.data
        ask_for(<const uint8_t *>byte_array_end(data))


cdef class Runs:
    """Entries of consecutive offsets by queue, all in one buffer; one by one they are tuples.

    Whoever makes them adds places, counts what they get, has the buffer allotted, and puts
    the entries of each run into it, one after the other.
    """

    def __cinit__(self):
        self.runs = NULL
        self.count = self.room = 0
        self.entries = b""

    def __dealloc__(self):
        cdef Py_ssize_t number
        for number in range(self.count):
            Py_DECREF(<object>self.runs[number].place)
        PyMem_Free(self.runs)

    cdef Py_ssize_t add(self, Place place) except -1:
        """A run that begins at a place; its number."""
        cdef OneRun *runs
        cdef Py_ssize_t room
        if self.count == self.room:
            room = 16 if self.room == 0 else 4 * self.room
            runs = <OneRun *>PyMem_Realloc(self.runs, room * sizeof(OneRun))
            if runs == NULL:
                raise MemoryError
            self.runs = runs
            self.room = room
        Py_INCREF(place)
        ask_for(<const uint8_t *><PyObject *>place.tail)  # it comes with `spread`
        self.runs[self.count] = OneRun(<PyObject *>place, place.next, 0, NULL)
        self.count += 1
        return self.count - 1

    cdef int allot(self) except -1:
        """The buffer for as many entries as were counted, and where those of each run go."""
        cdef Py_ssize_t number
        cdef Py_ssize_t size = 0
        cdef uint8_t *to
        for number in range(self.count):
            size += self.runs[number].count * QUEUE_ENTRY_BYTES
            _ask_for_tail(self.runs[number].place)  # so that `spread` finds it
        self.entries = PyBytes_FromStringAndSize(NULL, size)
        to = <uint8_t *>PyBytes_AS_STRING(self.entries)
        for number in range(self.count):
            self.runs[number].to = to
            to += self.runs[number].count * QUEUE_ENTRY_BYTES
        return 0

    cdef const uint8_t *begin(self) noexcept:
        return <const uint8_t *>PyBytes_AS_STRING(self.entries)

    def __len__(self):
        return self.count

    def __iter__(self):
        cdef list out = []
        cdef const uint8_t *data = self.begin()
        cdef Place place
        cdef Py_ssize_t number, size
        for number in range(self.count):
            place = <Place>self.runs[number].place
            size = self.runs[number].count * QUEUE_ENTRY_BYTES
            out.append((*place.key, self.runs[number].first, data[:size]))
            data += size
        return iter(out)

    def put_back(self):
        """Take back the moves of their places; a queue that is gone stays so."""
        cdef Py_ssize_t number
        cdef Place place
        for number in range(self.count):
            place = <Place>self.runs[number].place
            if place.next >= 0:
                place.next = self.runs[number].first


cdef inline bint _add_entries(
    Tail tail, int64_t queue_offset, const uint8_t *entries, Py_ssize_t size, set dirty
) except -1:
    """Add entries to a tail; False when they need a closer look."""
    cdef Py_ssize_t before = PyByteArray_GET_SIZE(tail.data)
    cdef const uint8_t *last = entries + size - QUEUE_ENTRY_BYTES
    if tail.at + before != queue_offset * QUEUE_ENTRY_BYTES:
        return False
    if _i64(entries) + _i32(entries + 8) <= tail.log_end:
        return False
    memcpy(_grow_much(tail.data, size), entries, size)
    tail.log_end = _i64(last) + _i32(last + 8)
    if not tail.dirty:
        tail.dirty = True
        dirty.add(tail.owner)
    return True


cdef inline bint _waited_for(tuple key, topics, list watched) except -1:
    if key[0] in topics:
        return True
    for some in watched:
        if key in some:
            return True
    return False


def spread(runs not None, dict queues not None, set dirty not None, topics, list watched not None):
    cdef list waiting = [some for some in watched if some]
    if isinstance(runs, Runs):
        return _spread_known(<Runs>runs, queues, dirty, topics, waiting)
    cdef Py_ssize_t done = 0
    cdef Py_ssize_t size = 0
    cdef Py_ssize_t more
    cdef list seen = []
    cdef tuple run
    cdef tuple key
    cdef bytes entries
    for run in runs:
        key = (run[0], run[1])
        queue = queues.get(key)
        if queue is None:
            break
        entries = <bytes?>run[3]
        more = PyBytes_GET_SIZE(entries)
        if more < QUEUE_ENTRY_BYTES:
            raise ValueError(f"a run of {more} bytes")
        if not _add_entries(
            <Tail?>queue.growth, run[2], <const uint8_t *>PyBytes_AS_STRING(entries), more, dirty
        ):
            break
        if _waited_for(key, topics, waiting):
            seen.append((queue, entries))
        size += more
        done += 1
    return done, size, seen


cdef _spread_known(Runs runs, dict queues, set dirty, topics, list waiting):
    """The same for runs whose places know the tails of their queues."""
    cdef Py_ssize_t size = 0
    cdef Py_ssize_t number, more
    cdef const uint8_t *data = runs.begin()
    cdef uint64_t signs = _signs(topics)
    cdef list seen = []
    cdef Place place
    cdef Tail tail
    for number in range(min(runs.count, TAILS_AHEAD)):
        _ask_for_end(runs.runs[number].place)
    for number in range(runs.count):
        if number + TAILS_AHEAD < runs.count:
            _ask_for_end(runs.runs[number + TAILS_AHEAD].place)
        place = <Place>runs.runs[number].place
        more = runs.runs[number].count * QUEUE_ENTRY_BYTES
        tail = place.tail
        if tail is None or tail.owner is None:
            queue = queues.get(place.key)
            if queue is None:
                return number, size, seen
            tail = place.tail = <Tail?>queue.growth
        if not _add_entries(tail, runs.runs[number].first, data, more, dirty):
            return number, size, seen
        if (waiting or place.sign & signs) and _waited_for(place.key, topics, waiting):
            seen.append((tail.owner, data[:more]))
        data += more
        size += more
    return runs.count, size, seen


# --- reading -------------------------------------------------------------------------------


cdef bint _wanted(const uint32_t *codes, Py_ssize_t count, uint32_t code) noexcept nogil:
    """Whether a code is among ascending ones."""
    cdef Py_ssize_t low = 0
    cdef Py_ssize_t middle
    while low < count:
        middle = (low + count) >> 1
        if codes[middle] < code:
            low = middle + 1
        elif codes[middle] > code:
            count = middle
        else:
            return True
    return False


cdef Py_ssize_t _codes(codes, uint32_t **out) except -1:
    """The tags codes of a set, ascending, in memory that the caller frees."""
    cdef list numbers = sorted(code for code in codes if 0 <= code <= 0xFFFFFFFF)
    cdef Py_ssize_t index
    out[0] = <uint32_t *>PyMem_Malloc(max(1, len(numbers)) * sizeof(uint32_t))
    if out[0] == NULL:
        raise MemoryError
    for index in range(len(numbers)):
        out[0][index] = numbers[index]
    return len(numbers)


cdef int _choose(Choice *choice, const uint8_t *entries, Py_ssize_t index, Py_ssize_t entry_count) except -1:
    """Go through queue entries from `index` on and note where the wanted records lie."""
    cdef const uint8_t *entry = entries + index * QUEUE_ENTRY_BYTES
    cdef const uint8_t *head
    cdef Span *spans
    cdef int64_t log_offset
    cdef int32_t size, magic
    cdef bint cold
    choice.found_bytes = choice.span_count = 0
    choice.last = -1
    choice.full = False
    while index < entry_count:
        log_offset = _i64(entry)
        size = _i32(entry + 8)
        if size == QUEUE_FILLER_SIZE and log_offset == 0:
            index += 1
            entry += QUEUE_ENTRY_BYTES
            continue
        if log_offset < choice.low or size < RECORD_BYTES_MIN or log_offset > choice.high - size:
            break
        if choice.count:
            cold = log_offset < choice.cold_below
            if choice.count >= (choice.cold_count_max if cold else choice.count_max) or (
                choice.taken_bytes + size > (choice.cold_bytes_max if cold else choice.bytes_max)
            ):
                choice.last = log_offset
                choice.full = True
                break
        if choice.codes == NULL or _wanted(choice.codes, choice.code_count, <uint32_t>_i64(entry + 12)):
            head = choice.data + (log_offset - choice.base)
            magic = _i32(head + 4)
            if _i32(head) != size or _i64(head + 28) != log_offset:
                break
            if magic != MAGIC_RECORD and magic != MAGIC_RECORD_V2:
                break
            if choice.queue_id != -1 and (
                _i32(head + 12) != choice.queue_id or _i64(head + 20) != choice.queue_offset + index
            ):
                break
            if choice.span_count and (
                choice.spans[choice.span_count - 1].at + choice.spans[choice.span_count - 1].size
                == log_offset - choice.base
            ):
                choice.spans[choice.span_count - 1].size += size
            else:
                if choice.span_count == choice.span_room:
                    spans = <Span *>PyMem_Realloc(
                        choice.spans, (2 * choice.span_room + 64) * sizeof(Span)
                    )
                    if spans == NULL:
                        raise MemoryError
                    choice.spans = spans
                    choice.span_room = 2 * choice.span_room + 64
                choice.spans[choice.span_count].at = log_offset - choice.base
                choice.spans[choice.span_count].size = size
                choice.span_count += 1
            choice.found_bytes += size
            choice.count += 1
            choice.taken_bytes += size
        choice.last = log_offset
        index += 1
        entry += QUEUE_ENTRY_BYTES
    choice.index = index
    return 0


cdef uint8_t *_copy(Choice *choice, uint8_t *to) noexcept nogil:
    """The records that were chosen, one behind the other."""
    cdef Py_ssize_t number
    for number in range(choice.span_count):
        to = _put(to, choice.data + choice.spans[number].at, choice.spans[number].size)
    return to


def select(
    bytes entries not None, Py_ssize_t index, view, int64_t base, int64_t low, int64_t high,
    int32_t queue_id, int64_t queue_offset, codes, int64_t count, int64_t taken_bytes,
    tuple limits not None,
):
    cdef Choice choice
    cdef Py_buffer buffer
    cdef uint32_t *wanted = NULL
    cdef bytes found
    choice.spans = NULL
    choice.span_room = 0
    choice.code_count = 0
    (
        choice.count_max, choice.bytes_max, choice.cold_count_max, choice.cold_bytes_max,
        choice.cold_below,
    ) = limits
    PyObject_GetBuffer(view, &buffer, PyBUF_SIMPLE)
    try:
        if codes is not None:
            choice.code_count = _codes(codes, &wanted)
        choice.codes = wanted
        choice.data = <const uint8_t *>buffer.buf
        choice.base = base
        choice.low = max(low, base)
        choice.high = min(high, base + buffer.len)
        choice.queue_id = queue_id
        choice.queue_offset = queue_offset
        choice.count = count
        choice.taken_bytes = taken_bytes
        _choose(
            &choice, <const uint8_t *>PyBytes_AS_STRING(entries), index,
            PyBytes_GET_SIZE(entries) // QUEUE_ENTRY_BYTES,
        )
        found = PyBytes_FromStringAndSize(NULL, choice.found_bytes)
        _copy(&choice, <uint8_t *>PyBytes_AS_STRING(found))
        return (
            choice.index, found, choice.count, choice.taken_bytes, choice.last, bool(choice.full)
        )
    finally:
        PyMem_Free(wanted)
        PyMem_Free(choice.spans)
        PyBuffer_Release(&buffer)
