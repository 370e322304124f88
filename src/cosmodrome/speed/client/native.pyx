# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True
"""The client's hot functions, compiled. `pure` has the same ones and is the file to read."""

from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from cpython.unicode cimport PyUnicode_AsUTF8AndSize
from libc.stdint cimport int32_t, int64_t, uint8_t, uint32_t, uint64_t
from libc.string cimport memcpy

from cosmodrome.errors import ProtocolError
from cosmodrome import layout

cdef int32_t MAGIC = layout.MAGIC_RECORD
cdef int32_t V6_HOSTS = layout.SYS_BORN_V6 | layout.SYS_STORE_V6
cdef Py_ssize_t RECORD_MIN = layout.RECORD_BYTES_MIN
cdef Py_ssize_t PROPERTIES_MAX = layout.PROPERTIES_BYTES_MAX
cdef int TOPIC_MAX = layout.TOPIC_BYTES_MAX
cdef Py_ssize_t FRAME_MAX = layout.FRAME_BYTES_MAX
cdef Py_ssize_t ITEM_HEAD = layout.BATCH_ITEM_HEAD.size
cdef enum:
    BEFORE_BODY = 88
cdef bytes HEX = b"0123456789abcdef"


cdef inline int64_t _read(const uint8_t* p, int width) noexcept nogil:
    cdef uint64_t value = 0
    cdef int i
    for i in range(width):
        value = value << 8 | p[i]
    return <int64_t>value if width == 8 else <int32_t><uint32_t>value


cdef inline void _write4(uint8_t* p, int64_t value) noexcept nogil:
    p[0] = (value >> 24) & 0xFF
    p[1] = (value >> 16) & 0xFF
    p[2] = (value >> 8) & 0xFF
    p[3] = value & 0xFF


def outline(bytes data not None, Py_ssize_t at):
    cdef const uint8_t* p = <const uint8_t*>PyBytes_AS_STRING(data)
    cdef Py_ssize_t end = PyBytes_GET_SIZE(data)
    cdef Py_ssize_t size, body_at, next_at, body_bytes, body_end, text_at, text_bytes
    cdef int32_t sys_flag
    cdef list found = []
    if at < 0:
        raise ValueError("a record begins at 0 or later")
    while end - at >= RECORD_MIN:
        size = _read(p + at, 4)
        sys_flag = <int32_t>_read(p + at + 36, 4)
        body_bytes = _read(p + at + 84, 4)
        body_at = at + BEFORE_BODY
        next_at = at + size
        body_end = body_at + body_bytes
        if (
            <int32_t>_read(p + at + 4, 4) != MAGIC
            or sys_flag & V6_HOSTS
            or body_bytes < 0
            or body_end + 3 > next_at
            or next_at > end
            or p[body_end] > TOPIC_MAX
        ):
            break
        text_at = body_end + 3 + p[body_end]
        text_bytes = next_at - text_at
        if (
            text_bytes < 0
            or text_bytes > PROPERTIES_MAX
            or text_bytes != (p[text_at - 2] << 8 | p[text_at - 1])
        ):
            break
        found.append((at, size, _read(p + at + 20, 8), sys_flag, body_at, body_end))
        at = next_at
    return found, at


def batch_body(items):
    cdef list rows = []
    cdef Py_ssize_t total = 0, size, text_bytes, body_bytes
    cdef bytes body, out
    cdef str text
    cdef int64_t flag
    cdef const char* chars
    cdef uint8_t* p
    for item in items:
        body = item.body
        text = item.properties
        flag = item.flag
        chars = PyUnicode_AsUTF8AndSize(text, &text_bytes)
        if text_bytes > 0xFFFF:
            raise OverflowError("int too big to convert")
        if not -0x80000000 <= flag <= 0x7FFFFFFF:
            raise OverflowError("a flag does not fit")
        rows.append((body, text, flag))
        total += ITEM_HEAD + 2 + PyBytes_GET_SIZE(body) + text_bytes
    out = PyBytes_FromStringAndSize(NULL, total)
    p = <uint8_t*>PyBytes_AS_STRING(out)
    for body, text, flag in rows:
        chars = PyUnicode_AsUTF8AndSize(text, &text_bytes)
        body_bytes = PyBytes_GET_SIZE(body)
        size = ITEM_HEAD + 2 + body_bytes + text_bytes
        _write4(p, size)
        _write4(p + 4, 0)
        _write4(p + 8, 0)
        _write4(p + 12, flag)
        _write4(p + 16, body_bytes)
        memcpy(p + ITEM_HEAD, PyBytes_AS_STRING(body), body_bytes)
        p += ITEM_HEAD + body_bytes
        p[0] = (text_bytes >> 8) & 0xFF
        p[1] = text_bytes & 0xFF
        memcpy(p + 2, chars, text_bytes)
        p += 2 + text_bytes
    return out


cdef inline Py_ssize_t _digits(char* out, int64_t value) noexcept nogil:
    """Decimal digits of a number that is not negative; how many."""
    cdef char turned[20]
    cdef Py_ssize_t count = 0, i
    while True:
        turned[count] = 48 + value % 10
        count += 1
        value //= 10
        if not value:
            break
    for i in range(count):
        out[i] = turned[count - 1 - i]
    return count


cdef inline Py_ssize_t _escape(char* out, const char* text, Py_ssize_t size) noexcept:
    """JSON text without its quotes; without `out` only how long it is."""
    cdef Py_ssize_t n = 0, i
    cdef uint8_t c
    cdef char short_form
    for i in range(size):
        c = text[i]
        short_form = 0
        if c == 34 or c == 92:
            short_form = c
        elif c == 8:
            short_form = b"b"
        elif c == 9:
            short_form = b"t"
        elif c == 10:
            short_form = b"n"
        elif c == 12:
            short_form = b"f"
        elif c == 13:
            short_form = b"r"
        elif c >= 32:
            if out != NULL:
                out[n] = c
            n += 1
            continue
        if short_form:
            if out != NULL:
                out[n] = 92
                out[n + 1] = short_form
            n += 2
        else:
            if out != NULL:
                memcpy(out + n, b"\\u00", 4)
                out[n + 4] = (<const char*>HEX)[c >> 4]
                out[n + 5] = (<const char*>HEX)[c & 15]
            n += 6
    return n


def send_frame(
    bytes opening not None,
    int64_t opaque,
    bytes fields not None,
    int64_t born_ms,
    str properties not None,
    bytes body not None,
):
    cdef Py_ssize_t text_bytes, header, length
    cdef const char* chars = PyUnicode_AsUTF8AndSize(properties, &text_bytes)
    cdef char numbers[40]
    cdef Py_ssize_t first, second
    cdef bytes out
    cdef char* p
    if opaque < 0 or born_ms < 0:
        raise ValueError("neither the opaque number nor the time is negative")
    first = _digits(numbers, opaque)
    second = _digits(numbers + 20, born_ms)
    header = (
        PyBytes_GET_SIZE(opening) + first + PyBytes_GET_SIZE(fields) + second
        + 7 + _escape(NULL, chars, text_bytes) + 3
    )
    length = 4 + header + PyBytes_GET_SIZE(body)
    if length + 4 > FRAME_MAX:
        raise ProtocolError(
            f"a frame of {length + 4} bytes; at most {FRAME_MAX} fit, send less at once"
        )
    out = PyBytes_FromStringAndSize(NULL, length + 4)
    p = PyBytes_AS_STRING(out)
    _write4(<uint8_t*>p, length)
    _write4(<uint8_t*>p + 4, header)
    p += 8
    memcpy(p, PyBytes_AS_STRING(opening), PyBytes_GET_SIZE(opening))
    p += PyBytes_GET_SIZE(opening)
    memcpy(p, numbers, first)
    p += first
    memcpy(p, PyBytes_AS_STRING(fields), PyBytes_GET_SIZE(fields))
    p += PyBytes_GET_SIZE(fields)
    memcpy(p, numbers + 20, second)
    p += second
    memcpy(p, b'","i":"', 7)
    p += 7
    p += _escape(p, chars, text_bytes)
    memcpy(p, b'"}}', 3)
    p += 3
    memcpy(p, PyBytes_AS_STRING(body), PyBytes_GET_SIZE(body))
    return out
