# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True
# cython: initializedcheck=False
"""Stored records as Arrow columns, compiled. `pure` is the law and the file to read.

No Python object is made for an ordinary record. Whatever is unusual (damage above all, but also
packed bodies, texts that are not UTF-8 and IPv6 hosts) is handed to `pure`, so its verdict
and its words are written once. Nothing here reads beyond a length that was checked before.

A buffer grows as a bytes object that nobody else has seen, and is handed out as that object.
"""

from cpython.buffer cimport PyBUF_SIMPLE, PyBuffer_Release, PyObject_GetBuffer
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from cpython.mem cimport PyMem_Free, PyMem_Malloc
from cpython.object cimport PyObject
from libc.stdint cimport int32_t, int64_t, uint8_t, uint32_t, uint64_t
from libc.string cimport memchr, memcmp, memcpy, memset

from cosmodrome.speed.core.native cimport _checksum, _i16, _i32, _i64, _is_utf8

from cosmodrome import layout
from cosmodrome.speed.arrow import pure

cdef extern from "Python.h":
    PyObject *new_bytes "PyBytes_FromStringAndSize"(const char *data, Py_ssize_t size) except NULL
    int _PyBytes_Resize(PyObject **owner, Py_ssize_t size) except -1
    char *chars_of "PyBytes_AS_STRING"(PyObject *owner)
    void Py_XDECREF(PyObject *owner)

cdef enum:  # why a walk ended, as in `layout`
    SOUND = -1  # it did not
    STOP_END = 0
    STOP_FULL = 1
    STOP_PARTIAL = 2
    STOP_BLANK = 3
    STOP_EMPTY = 4
    STOP_CORRUPT = 5

cdef enum:  # columns in the order of KINDS
    TOPIC, BROKER, QUEUE_ID, QUEUE_OFFSET, BODY, MSG_ID, OFFSET_MSG_ID, TAGS, KEYS, PROPERTIES
    BORN_TIME, STORE_TIME, BORN_HOST, FLAG, SYS_FLAG, RECONSUME_TIMES, COMMIT_LOG_OFFSET
    STORE_SIZE, COLUMNS

cdef enum:
    HEAD_BYTES = 48
    MIDDLE_BYTES = 16
    HOST_V4 = 8
    HOST_V6 = 20
    PAIRS_PLAIN = 64  # more are rare: a dict finds their duplicates
    PAIRS_ROOM = 32767 // 4 + 2
    TOPICS_SEEN_MAX = 1024
    SET_LINEAR_MAX = 16

assert HEAD_BYTES == layout.RECORD_HEAD.size and MIDDLE_BYTES == layout.RECORD_MIDDLE.size
assert (HOST_V4, HOST_V6) == (layout.HOST_V4_BYTES, layout.HOST_V6_BYTES)
assert list(pure.KINDS).index("born_time") == BORN_TIME and len(pure.KINDS) == COLUMNS
assert layout.PROPERTIES_BYTES_MAX <= 32767

cdef int32_t MAGIC_V1 = layout.MAGIC_RECORD
cdef int32_t MAGIC_V2 = layout.MAGIC_RECORD_V2
cdef int32_t MAGIC_BLANK = layout.MAGIC_BLANK
cdef Py_ssize_t RECORD_MIN = layout.RECORD_BYTES_MIN
cdef uint32_t CRC_MASK = layout.CRC_MASK
cdef int32_t COMPRESSED = layout.SYS_COMPRESSED
cdef int32_t BORN_V6 = layout.SYS_BORN_V6
cdef int32_t STORE_V6 = layout.SYS_STORE_V6
cdef int32_t TRANSACTION = layout.SYS_TRANSACTION_MASK
cdef int32_t PREPARED = layout.SYS_PREPARED
cdef int32_t ROLLBACK = layout.SYS_ROLLBACK
cdef int64_t FIRST_MS = pure.FIRST_MS
cdef int64_t LAST_MS = pure.LAST_MS
cdef int64_t MOST = pure.INT64_MAX
cdef int64_t LEAST = pure.INT64_MIN
cdef bytes HEX = b"".join([b"%02X" % byte for byte in range(256)])

cdef Py_ssize_t _WIDTHS[COLUMNS]  # of a number in bytes; 0 for texts and maps
for _index, _kind in enumerate(pure.KINDS.values()):
    _WIDTHS[_index] = {"i": 4, "q": 8}.get(_kind, 0)

cdef struct Room:
    PyObject *owner  # bytes, ours alone
    uint8_t *data
    Py_ssize_t size
    Py_ssize_t room
    Py_ssize_t before  # its size the last time: a good guess for this time

cdef struct Column:
    Room data
    Room offsets
    Room validity
    Py_ssize_t nulls

cdef struct Pair:
    const uint8_t *name
    const uint8_t *value
    Py_ssize_t name_bytes
    Py_ssize_t value_bytes

cdef struct Parts:
    const uint8_t *start
    const uint8_t *born
    const uint8_t *store_ms
    const uint8_t *store
    const uint8_t *middle
    const uint8_t *body
    const uint8_t *topic
    const uint8_t *properties
    Py_ssize_t size
    Py_ssize_t body_bytes
    Py_ssize_t topic_bytes
    Py_ssize_t properties_bytes
    int32_t sys_flag


# --- growing buffers -------------------------------------------------------------------------

cdef int _grow(Room *to, Py_ssize_t more) except -1:
    cdef Py_ssize_t room = 2 * to.room
    if to.owner == NULL:
        room = to.before + to.before // 8 + 256
    if room <= to.size + more:
        room = to.size + more + 1
    if to.owner == NULL:
        to.owner = new_bytes(NULL, room)
    else:
        try:
            _PyBytes_Resize(&to.owner, room)
        except BaseException:
            _drop(to)
            raise
    to.data = <uint8_t *>chars_of(to.owner)
    to.room = room
    return 0


cdef inline int _reserve(Room *to, Py_ssize_t more) except -1:
    if to.room - to.size <= more:  # also for nothing: a copy of no bytes needs an address, too
        _grow(to, more)
    return 0


cdef inline int _put_int32(Room *to, int32_t value) except -1:
    _reserve(to, 4)
    memcpy(to.data + to.size, &value, 4)
    to.size += 4
    return 0


cdef inline int _put_int64(Room *to, int64_t value) except -1:
    _reserve(to, 8)
    memcpy(to.data + to.size, &value, 8)
    to.size += 8
    return 0


cdef inline void _set_int32(Room *to, int32_t value) noexcept:
    """Where `_more_rows` has made room."""
    memcpy(to.data + to.size, &value, 4)
    to.size += 4


cdef inline void _set_int64(Room *to, int64_t value) noexcept:
    memcpy(to.data + to.size, &value, 8)
    to.size += 8


cdef void _drop(Room *room) noexcept:
    cdef PyObject *owner = room.owner
    room.owner, room.data, room.size, room.room = NULL, NULL, 0, 0
    Py_XDECREF(owner)


cdef bytes _hand_out(Room *room):
    cdef bytes out
    if room.owner == NULL:
        return b""
    room.before = room.size
    if room.size == 0:
        _drop(room)
        return b""
    try:
        _PyBytes_Resize(&room.owner, room.size)
    except BaseException:
        _drop(room)
        raise
    out = <bytes>room.owner
    _drop(room)
    return out


cdef inline int _put_text(Column *to, const uint8_t *at, Py_ssize_t size) except -1:
    _put_bytes(&to.data, at, size)
    return _put_int32(&to.offsets, <int32_t>to.data.size)


cdef inline int _put_bytes(Room *to, const uint8_t *at, Py_ssize_t size) except -1:
    _reserve(to, size)
    memcpy(to.data + to.size, at, size)
    to.size += size
    return 0


cdef int _put_null(Column *to, Py_ssize_t row) except -1:
    """Of a text; its offset is put by the caller."""
    _cover(&to.validity, row + 1)
    to.validity.data[row >> 3] &= <uint8_t>~(1 << (row & 7))
    to.nulls += 1
    return 0


cdef int _cover(Room *validity, Py_ssize_t rows) except -1:
    """Bits for so many rows; new ones are set."""
    cdef Py_ssize_t more = (rows + 7) // 8 - validity.size
    if more > 0:
        _reserve(validity, more)
        memset(validity.data + validity.size, 0xFF, more)
        validity.size += more
    return 0


# --- parts of a record -----------------------------------------------------------------------

cdef int _look(
    const uint8_t *data, Py_ssize_t at, Py_ssize_t end, int64_t base, Parts *parts
) noexcept nogil:
    """SOUND with its parts, or why not: `pure.look` in other words."""
    cdef const uint8_t *start = data + at
    cdef Py_ssize_t left = end - at
    cdef Py_ssize_t size, fixed, width, i
    cdef int32_t magic
    if left < 8:
        for i in range(left):
            if start[i]:
                return STOP_PARTIAL
        return STOP_EMPTY
    size = _i32(start)
    magic = _i32(start + 4)
    if magic == MAGIC_BLANK and size >= 8:
        return STOP_BLANK
    if size == 0 and magic == 0:
        return STOP_EMPTY
    if (magic != MAGIC_V1 and magic != MAGIC_V2) or size < RECORD_MIN:
        return STOP_CORRUPT
    if size > left:
        return STOP_PARTIAL
    if base >= 0 and (base > MOST - at or _i64(start + 28) != base + at):
        return STOP_CORRUPT
    parts.start = start
    parts.size = size
    parts.sys_flag = _i32(start + 36)
    parts.born = start + HEAD_BYTES
    parts.store_ms = parts.born + (HOST_V6 if parts.sys_flag & BORN_V6 else HOST_V4)
    parts.store = parts.store_ms + 8
    parts.middle = parts.store + (HOST_V6 if parts.sys_flag & STORE_V6 else HOST_V4)
    parts.body = parts.middle + MIDDLE_BYTES
    width = 1 if magic == MAGIC_V1 else 2
    fixed = (parts.body - start) + width + 2
    if fixed > size:
        return STOP_CORRUPT
    parts.body_bytes = _i32(parts.body - 4)
    if parts.body_bytes < 0 or parts.body_bytes > size - fixed:
        return STOP_CORRUPT
    parts.topic = parts.body + parts.body_bytes + width
    parts.topic_bytes = <signed char>(parts.topic - 1)[0] if width == 1 else _i16(parts.topic - 2)
    if parts.topic_bytes < 0 or parts.topic_bytes > size - fixed - parts.body_bytes:
        return STOP_CORRUPT
    parts.properties = parts.topic + parts.topic_bytes + 2
    parts.properties_bytes = _i16(parts.properties - 2)
    if parts.properties_bytes != size - fixed - parts.body_bytes - parts.topic_bytes:
        return STOP_CORRUPT
    return SOUND


cdef bint _is_ascii(const uint8_t *at, Py_ssize_t size) noexcept nogil:
    cdef uint64_t word, seen = 0
    cdef uint8_t byte = 0
    while size >= 8:
        memcpy(&word, at, 8)
        seen |= word
        at += 8
        size -= 8
    while size > 0:
        byte |= at[0]
        at += 1
        size -= 1
    return not (seen & <uint64_t>0x8080808080808080 or byte & 0x80)


cdef Py_ssize_t _split(
    const uint8_t *at, Py_ssize_t size, Pair *pairs, bint unique
) noexcept nogil:
    """The pairs of a properties text, or -1 when they are too many to look for duplicates."""
    cdef const uint8_t *end = at + size
    cdef const uint8_t *middle
    cdef const uint8_t *stop
    cdef Py_ssize_t count = 0, i, name_bytes
    while at < end:
        stop = <const uint8_t *>memchr(at, 2, end - at)
        if stop == NULL:
            stop = end
        middle = <const uint8_t *>memchr(at, 1, stop - at)
        if middle != NULL and middle > at and middle + 1 < stop:
            name_bytes = middle - at
            i = count
            if not unique:
                for i in range(count):
                    if pairs[i].name_bytes == name_bytes and not memcmp(
                        pairs[i].name, at, name_bytes
                    ):
                        break
                else:
                    i = count
            if i == count:
                if count == (PAIRS_ROOM if unique else PAIRS_PLAIN):
                    return -1
                pairs[i].name = at
                pairs[i].name_bytes = name_bytes
                count += 1
            pairs[i].value = middle + 1
            pairs[i].value_bytes = stop - middle - 1
        at = stop + 1
    return count


cdef inline Pair *_find(
    Pair *pairs, Py_ssize_t count, const char *name, Py_ssize_t name_bytes
) noexcept nogil:
    cdef Py_ssize_t i
    for i in range(count):
        if pairs[i].name_bytes == name_bytes and not memcmp(pairs[i].name, name, name_bytes):
            return &pairs[i]
    return NULL


cdef inline int64_t _micros(int64_t ms) noexcept nogil:
    return 1000 * (FIRST_MS if ms < FIRST_MS else LAST_MS if ms > LAST_MS else ms)


cdef inline Py_ssize_t _digits(char *out, uint32_t value) noexcept nogil:
    cdef char turned[10]
    cdef Py_ssize_t count = 0, i
    while True:
        turned[count] = <char>(48 + value % 10)
        count += 1
        value //= 10
        if not value:
            break
    for i in range(count):
        out[i] = turned[count - 1 - i]
    return count


cdef frozenset _encoded(texts):
    return None if texts is None else frozenset(text.encode("utf-8", "surrogatepass") for text in texts)


cdef bytes _replaced(const uint8_t *at, Py_ssize_t size):
    return str(PyBytes_FromStringAndSize(<const char *>at, size), "utf-8", "replace").encode()


# --- the builder -----------------------------------------------------------------------------

cdef class ColumnBuilder:
    """Takes records in and gives columns out; see `pure.ColumnBuilder`."""

    cdef readonly Py_ssize_t rows
    cdef readonly Py_ssize_t fault_size
    cdef readonly int64_t records
    cdef readonly int64_t last_offset
    cdef readonly str fault
    cdef tuple names
    cdef uint32_t wants
    cdef Column columns[COLUMNS]
    cdef Column map_names
    cdef Column map_values
    cdef Pair *pairs
    cdef Py_ssize_t pair_count
    cdef Py_ssize_t filled
    cdef Py_ssize_t roomy  # so many rows have room for their numbers and offsets
    cdef Py_ssize_t rows_before  # of the last batch: a good guess for this one
    cdef Py_ssize_t rows_max
    cdef Py_ssize_t bytes_max
    cdef Py_ssize_t body_bytes_max
    cdef bint busy
    cdef bint check_crc
    cdef bint skip_unseen
    cdef bint with_pairs
    cdef bint queue_seen
    cdef bint queue_wanted
    cdef bint topic_wanted
    cdef int32_t last_queue
    cdef int64_t since_ms
    cdef int64_t until_ms
    cdef bytes broker
    cdef frozenset topics
    cdef frozenset queue_ids
    cdef frozenset tags
    cdef tuple tags_few
    cdef bytes marked
    cdef list marks
    cdef dict topics_seen
    cdef bytes topic_raw
    cdef bytes topic_text
    cdef bytes mended  # what `pairs` points into when the properties had to be rewritten
    cdef uint8_t host_raw[HOST_V6]
    cdef char host_text[64]
    cdef Py_ssize_t host_raw_bytes
    cdef Py_ssize_t host_text_bytes

    def __cinit__(self):
        memset(&self.columns, 0, sizeof(self.columns))
        memset(&self.map_names, 0, sizeof(Column))
        memset(&self.map_values, 0, sizeof(Column))
        self.pairs = <Pair *>PyMem_Malloc(PAIRS_ROOM * sizeof(Pair))
        if self.pairs == NULL:
            raise MemoryError

    def __dealloc__(self):
        self._clear()
        PyMem_Free(self.pairs)

    def __init__(
        self,
        columns,
        *,
        broker=None,
        bint check_crc=True,
        rows_max=8192,
        bytes_max=16 << 20,
        body_bytes_max=64 << 20,
        topics=None,
        queue_ids=None,
        tags=None,
        int64_t since_ms=LEAST,
        int64_t until_ms=MOST,
        bint skip_unseen=False,
        marked=None,
    ):
        pure.check_arguments(columns, broker, rows_max, bytes_max, body_bytes_max)
        self._clear()
        self.names = tuple(columns)
        self.wants = 0
        for index, name in enumerate(pure.KINDS):
            if name in self.names:
                self.wants |= <uint32_t>1 << <int>index
        self.broker = None if broker is None else broker.encode()
        self.check_crc = check_crc
        self.rows_max = rows_max
        self.bytes_max = bytes_max
        self.body_bytes_max = body_bytes_max
        self.topics = _encoded(topics)
        self.queue_ids = None if queue_ids is None else frozenset(queue_ids)
        self.tags = _encoded(tags)
        self.tags_few = None
        if tags is not None and len(tags) <= SET_LINEAR_MAX:
            self.tags_few = tuple(self.tags)
        self.since_ms = since_ms
        self.until_ms = until_ms
        self.skip_unseen = skip_unseen
        self.marked = None if marked is None else marked.encode("utf-8", "surrogatepass")
        self.with_pairs = tags is not None or marked is not None or bool(
            self.wants & (1 << MSG_ID | 1 << TAGS | 1 << KEYS | 1 << PROPERTIES)
        )
        self.marks = []
        self.topics_seen = {}
        self.topic_raw = None
        self.queue_seen = False
        self.host_raw_bytes = 0
        self.records = 0
        self.last_offset = -1
        self.fault = ""
        self.fault_size = 0

    cdef void _clear(self) noexcept:
        cdef int i
        for i in range(COLUMNS):
            self._clear_column(&self.columns[i])
        self._clear_column(&self.map_names)
        self._clear_column(&self.map_values)
        self.rows = 0
        self.filled = 0
        self.roomy = 0

    cdef void _clear_column(self, Column *column) noexcept:
        _drop(&column.data)
        _drop(&column.offsets)
        _drop(&column.validity)
        column.nulls = 0

    cdef inline bint _has(self, int column) noexcept:
        return self.wants >> column & 1

    cdef int _enter(self) except -1:
        if self.busy:  # a body is being decompressed without the interpreter's lock
            raise RuntimeError("a ColumnBuilder serves one thread at a time")
        self.busy = True
        return 0

    # --- walking -----------------------------------------------------------------------------

    def add(
        self, data, Py_ssize_t at, Py_ssize_t end, *, int64_t base=-1, int64_t low=0,
        int64_t high=MOST,
    ):
        cdef Py_buffer view
        cdef int stop
        self._enter()
        self.fault = ""
        self.fault_size = 0
        try:
            PyObject_GetBuffer(data, &view, PyBUF_SIMPLE)
        except BaseException:
            self.busy = False
            raise
        try:
            if not 0 <= at <= end <= view.len:
                raise ValueError(f"records from {at} to {end} outside of {view.len} bytes")
            try:
                stop = self._walk(<const uint8_t *>view.buf, &at, end, base, low, high)
            except BaseException:
                self.marks = []
                self._clear()  # a row may be there by half
                raise
        finally:
            PyBuffer_Release(&view)
            self.busy = False
        if stop == STOP_CORRUPT and not self.fault_size:
            _, self.fault = pure.look(memoryview(data), at, end, base)
        return at, stop

    cdef int _walk(
        self, const uint8_t *data, Py_ssize_t *cursor, Py_ssize_t end, int64_t base, int64_t low,
        int64_t high,
    ) except -1:
        cdef Parts parts
        cdef Py_ssize_t at = cursor[0]
        cdef int64_t queue_offset
        cdef int stop
        while at < end:
            cursor[0] = at
            if self.rows >= self.rows_max or self.filled >= self.bytes_max:
                return STOP_FULL
            stop = _look(data, at, end, base, &parts)
            if stop != SOUND:
                return stop
            queue_offset = _i64(parts.start + 20)
            if low <= queue_offset < high and self._wanted(&parts) and not self._row(&parts):
                self.fault_size = parts.size
                return STOP_CORRUPT
            self.records += 1
            self.last_offset = queue_offset
            at += parts.size
        cursor[0] = at
        return STOP_END

    cdef bint _wanted(self, Parts *parts) except -1:
        """What can be decided without the properties."""
        cdef int32_t kind
        cdef int64_t store_ms
        if self.queue_ids is not None:
            if not self.queue_seen or _i32(parts.start + 12) != self.last_queue:
                self.last_queue = _i32(parts.start + 12)
                self.queue_wanted = self.last_queue in self.queue_ids
                self.queue_seen = True
            if not self.queue_wanted:
                return False
        if self.skip_unseen:
            kind = parts.sys_flag & TRANSACTION
            if kind == PREPARED or kind == ROLLBACK:
                return False
        store_ms = _i64(parts.store_ms)
        if not self.since_ms <= store_ms < self.until_ms:
            return False
        if self.topics is None:
            return True
        self._know_topic(parts)
        return self.topic_wanted

    cdef int _know_topic(self, Parts *parts) except -1:
        if (
            self.topic_raw is not None
            and PyBytes_GET_SIZE(self.topic_raw) == parts.topic_bytes
            and not memcmp(PyBytes_AS_STRING(self.topic_raw), parts.topic, parts.topic_bytes)
        ):
            return 0
        raw = PyBytes_FromStringAndSize(<const char *>parts.topic, parts.topic_bytes)
        seen = self.topics_seen.get(raw)
        if seen is None:
            if len(self.topics_seen) >= TOPICS_SEEN_MAX:
                self.topics_seen.clear()
            text = _replaced(parts.topic, parts.topic_bytes)
            seen = self.topics_seen[raw] = text, self.topics is None or text in self.topics
        self.topic_raw = raw
        self.topic_text, self.topic_wanted = seen
        return 0

    cdef int _know_pairs(self, Parts *parts) except -1:
        cdef const uint8_t *at = parts.properties
        cdef Py_ssize_t size = parts.properties_bytes
        self.pair_count = -1
        if _is_ascii(at, size) or _is_utf8(at, size):
            self.pair_count = _split(at, size, self.pairs, False)
        if self.pair_count < 0:
            text = str(PyBytes_FromStringAndSize(<const char *>at, size), "utf-8", "replace")
            self.mended = "".join(
                [f"{name}\1{value}\2" for name, value in pure.parse_pairs(text).items()]
            ).encode()
            self.pair_count = _split(
                <const uint8_t *>PyBytes_AS_STRING(self.mended), PyBytes_GET_SIZE(self.mended),
                self.pairs, True,
            )
            if self.pair_count < 0:
                raise AssertionError("more pairs than 32767 bytes have room for")
        return 0

    cdef bint _has_wanted_tag(self, Pair *tag) except -1:
        cdef bytes wanted
        if tag == NULL:
            return False
        if self.tags_few is None:
            return PyBytes_FromStringAndSize(<const char *>tag.value, tag.value_bytes) in self.tags
        for wanted in self.tags_few:
            if PyBytes_GET_SIZE(wanted) == tag.value_bytes and not memcmp(
                PyBytes_AS_STRING(wanted), tag.value, tag.value_bytes
            ):
                return True
        return False

    # --- rows --------------------------------------------------------------------------------

    cdef bint _row(self, Parts *parts) except -1:
        """Keep one row unless its tag is not wanted; false when something is wrong with it."""
        cdef uint32_t found
        cdef bytes packed = None
        cdef const uint8_t *body = parts.body
        cdef Py_ssize_t body_bytes = parts.body_bytes
        if self.with_pairs:
            self._know_pairs(parts)
            if self.tags is not None and not self._has_wanted_tag(
                _find(self.pairs, self.pair_count, "TAGS", 4)
            ):
                return True
        if self.check_crc:
            found = _checksum(body, body_bytes) & CRC_MASK
            if <int32_t>found != _i32(parts.start + 8):
                self.fault = pure.checksum_fault(_i32(parts.start + 8), found)
                return False
        if self._has(BODY):
            if parts.sys_flag & COMPRESSED or body_bytes > self.body_bytes_max:
                plain = pure.plain_body(
                    PyBytes_FromStringAndSize(<const char *>body, body_bytes), parts.sys_flag,
                    self.body_bytes_max,
                )
                if isinstance(plain, str):
                    self.fault = plain
                    return False
                packed = plain
                body = <const uint8_t *>PyBytes_AS_STRING(packed)
                body_bytes = PyBytes_GET_SIZE(packed)
        if self.rows >= self.roomy:
            self._more_rows()
        if self._has(BODY):
            self._text(BODY, body, body_bytes)
        self._keep_numbers(parts)
        self._keep_texts(parts)
        if self._has(PROPERTIES):
            self._keep_pairs()
        self.rows += 1
        return True

    cdef int _more_rows(self) except -1:
        """Room for numbers and offsets of more rows, so that these need not look for it each."""
        cdef Py_ssize_t rows = 2 * self.roomy if self.roomy else self.rows_before
        cdef Column *column
        cdef int i
        rows = max(self.rows + 1, min(max(rows, 256), self.rows_max))
        for i in range(COLUMNS):
            if not self._has(i) or i == BROKER:
                continue  # the broker's name is put by `take`
            column = &self.columns[i]
            if _WIDTHS[i]:
                _reserve(&column.data, rows * _WIDTHS[i] - column.data.size)
            else:
                _reserve(&column.offsets, 4 * (rows + 1) - column.offsets.size)
                if column.offsets.size == 0:
                    _set_int32(&column.offsets, 0)
        self.roomy = rows
        return 0

    cdef inline int _text(self, int column, const uint8_t *at, Py_ssize_t size) except -1:
        cdef Column *to = &self.columns[column]
        self.filled += size
        _put_bytes(&to.data, at, size)
        _set_int32(&to.offsets, <int32_t>to.data.size)
        return 0

    cdef void _keep_numbers(self, Parts *parts) noexcept:
        cdef const uint8_t *start = parts.start
        if self._has(QUEUE_ID):
            _set_int32(&self.columns[QUEUE_ID].data, _i32(start + 12))
        if self._has(QUEUE_OFFSET):
            _set_int64(&self.columns[QUEUE_OFFSET].data, _i64(start + 20))
        if self._has(BORN_TIME):
            _set_int64(&self.columns[BORN_TIME].data, _micros(_i64(start + 40)))
        if self._has(STORE_TIME):
            _set_int64(&self.columns[STORE_TIME].data, _micros(_i64(parts.store_ms)))
        if self._has(FLAG):
            _set_int32(&self.columns[FLAG].data, _i32(start + 16))
        if self._has(SYS_FLAG):
            _set_int32(&self.columns[SYS_FLAG].data, parts.sys_flag)
        if self._has(RECONSUME_TIMES):
            _set_int32(&self.columns[RECONSUME_TIMES].data, _i32(parts.middle))
        if self._has(COMMIT_LOG_OFFSET):
            _set_int64(&self.columns[COMMIT_LOG_OFFSET].data, _i64(start + 28))
        if self._has(STORE_SIZE):
            _set_int32(&self.columns[STORE_SIZE].data, <int32_t>parts.size)

    cdef int _keep_texts(self, Parts *parts) except -1:
        cdef Pair *pair
        if self._has(TOPIC):
            self._know_topic(parts)
            self._text(
                TOPIC, <const uint8_t *>PyBytes_AS_STRING(self.topic_text),
                PyBytes_GET_SIZE(self.topic_text),
            )
        if self._has(MSG_ID):
            pair = _find(self.pairs, self.pair_count, "UNIQ_KEY", 8)
            if pair != NULL:
                self._text(MSG_ID, pair.value, pair.value_bytes)
            else:
                self._offset_id(MSG_ID, parts)
        if self._has(OFFSET_MSG_ID):
            self._offset_id(OFFSET_MSG_ID, parts)
        if self._has(TAGS):
            self._maybe(TAGS, _find(self.pairs, self.pair_count, "TAGS", 4))
        if self._has(KEYS):
            self._maybe(KEYS, _find(self.pairs, self.pair_count, "KEYS", 4))
        if self._has(BORN_HOST):
            self._know_host(parts.born, parts.store_ms - parts.born)
            self._text(BORN_HOST, <const uint8_t *>self.host_text, self.host_text_bytes)
        if self.marked is not None:
            pair = _find(
                self.pairs, self.pair_count, PyBytes_AS_STRING(self.marked),
                PyBytes_GET_SIZE(self.marked),
            )
            if pair != NULL:
                value = PyBytes_FromStringAndSize(<const char *>pair.value, pair.value_bytes)
                self.marks.append((self.rows, value.decode()))
        return 0

    cdef int _maybe(self, int column, Pair *pair) except -1:
        cdef Column *to = &self.columns[column]
        if pair != NULL:
            return self._text(column, pair.value, pair.value_bytes)
        _put_null(to, self.rows)
        _set_int32(&to.offsets, <int32_t>to.data.size)
        return 0

    cdef int _offset_id(self, int column, Parts *parts) except -1:
        """The offset message id: store host and log offset in hexadecimal."""
        cdef uint8_t text[2 * (HOST_V6 + 8)]
        cdef const char *digits = PyBytes_AS_STRING(HEX)
        cdef Py_ssize_t host_bytes = parts.middle - parts.store
        cdef Py_ssize_t i
        for i in range(host_bytes):
            memcpy(text + 2 * i, digits + 2 * parts.store[i], 2)
        for i in range(8):
            memcpy(text + 2 * (host_bytes + i), digits + 2 * parts.start[28 + i], 2)
        return self._text(column, text, 2 * (host_bytes + 8))

    cdef int _know_host(self, const uint8_t *host, Py_ssize_t size) except -1:
        cdef bytes text
        cdef Py_ssize_t count = 0
        cdef int i
        if self.host_raw_bytes == size and not memcmp(self.host_raw, host, size):
            return 0
        self.host_raw_bytes = 0
        if size == HOST_V4:
            for i in range(4):
                count += _digits(&self.host_text[count], host[i])
                self.host_text[count] = 46 if i < 3 else 58
                count += 1
            count += _digits(&self.host_text[count], <uint32_t>_i32(host + 4))
        else:
            text = pure.host_text(host[:size]).encode()
            count = PyBytes_GET_SIZE(text)
            if count > <Py_ssize_t>sizeof(self.host_text):
                raise AssertionError(f"a host of {count} characters")
            memcpy(self.host_text, PyBytes_AS_STRING(text), count)
        memcpy(self.host_raw, host, size)
        self.host_raw_bytes = size
        self.host_text_bytes = count
        return 0

    cdef int _keep_pairs(self) except -1:
        cdef Py_ssize_t i
        cdef Pair *pair
        if self.rows == 0:
            self._start_pairs()
        for i in range(self.pair_count):
            pair = &self.pairs[i]
            _put_text(&self.map_names, pair.name, pair.name_bytes)
            _put_text(&self.map_values, pair.value, pair.value_bytes)
            self.filled += pair.name_bytes + pair.value_bytes
        _set_int32(
            &self.columns[PROPERTIES].offsets, <int32_t>(self.map_names.offsets.size // 4 - 1)
        )
        return 0

    cdef int _start_pairs(self) except -1:
        _put_int32(&self.map_names.offsets, 0)
        _put_int32(&self.map_values.offsets, 0)
        return 0

    # --- handing out -------------------------------------------------------------------------

    def take(self):
        cdef Py_ssize_t rows = self.rows
        cdef list marks = self.marks
        self._enter()
        try:
            return rows, {name: self._buffers(name) for name in self.names}, marks
        finally:
            self.marks = []
            self._clear()
            self.rows_before = rows
            self.busy = False

    cdef tuple _buffers(self, str name):
        cdef Column *column = &self.columns[<Py_ssize_t>_INDEX[name]]
        kind = pure.KINDS[name]
        if kind == "map":
            if self.rows == 0:
                _put_int32(&column.offsets, 0)
                self._start_pairs()
            return (
                _hand_out(&column.offsets),
                _hand_out(&self.map_names.offsets), _hand_out(&self.map_names.data),
                _hand_out(&self.map_values.offsets), _hand_out(&self.map_values.data),
            )
        if kind != "text":
            return (_hand_out(&column.data),)
        if name == "broker":
            self._fill_broker(column)
        elif self.rows == 0:
            _put_int32(&column.offsets, 0)
        return self._texts_of(column)

    cdef tuple _texts_of(self, Column *column):
        validity = None
        if column.nulls:
            _cover(&column.validity, self.rows)
            if self.rows & 7:
                column.validity.data[self.rows >> 3] &= <uint8_t>((1 << (self.rows & 7)) - 1)
            validity = _hand_out(&column.validity)
        return validity, _hand_out(&column.offsets), _hand_out(&column.data)

    cdef int _fill_broker(self, Column *column) except -1:
        cdef Py_ssize_t row
        _put_int32(&column.offsets, 0)
        for row in range(self.rows):
            if self.broker is None:
                _put_null(column, row)
                _put_int32(&column.offsets, 0)
            else:
                _put_text(
                    column, <const uint8_t *>PyBytes_AS_STRING(self.broker),
                    PyBytes_GET_SIZE(self.broker),
                )
        return 0


_INDEX = {name: index for index, name in enumerate(pure.KINDS)}
