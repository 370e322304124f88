# Part of native.pyx: hashes, the encoder of records and the walk over them (the twin: records.py).

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
            if why != WALK_MORE:
                return entries, at, why
            entries.append(_entry(&fields, size))
            at += size
        return entries, at, WALK_MORE
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
                return WALK_CORRUPT
        return WALK_EMPTY
    size = _i32(data)
    magic = _i32(data + 4)
    if magic == MAGIC_BLANK and size >= 8:
        return WALK_BLANK
    if size == 0 and magic == 0:
        return WALK_EMPTY
    if size > stop - at:
        return WALK_CORRUPT
    if size < RECORD_BYTES_MIN or (magic != MAGIC_RECORD and magic != MAGIC_RECORD_V2):
        return WALK_CORRUPT
    fields.log_offset = _i64(data + 28)
    if <uint64_t>fields.log_offset != <uint64_t>base + <uint64_t>at:
        return WALK_CORRUPT
    sys_flag = _i32(data + 36)
    store_at = HEAD_BYTES + (HOST_V6_BYTES if sys_flag & SYS_BORN_V6 else HOST_V4_BYTES)
    body_at = (
        store_at + 8 + (HOST_V6_BYTES if sys_flag & SYS_STORE_V6 else HOST_V4_BYTES)
        + MIDDLE_BYTES
    )
    topic_width = 1 if magic == MAGIC_RECORD else 2
    if body_at + topic_width + 2 > size:
        return WALK_CORRUPT
    body_bytes = _i32(data + body_at - 4)
    if body_bytes < 0 or body_bytes > size - body_at - topic_width - 2:
        return WALK_CORRUPT
    topic_at = body_at + body_bytes + topic_width
    if topic_width == 1:
        topic_bytes = <signed char>data[topic_at - 1]
    else:
        topic_bytes = _i16(data + topic_at - 2)
    if topic_bytes < 0 or topic_bytes > size - topic_at - 2:
        return WALK_CORRUPT
    properties_at = topic_at + topic_bytes + 2
    if _i16(data + properties_at - 2) != size - properties_at:
        return WALK_CORRUPT
    fields.store_ms = _i64(data + store_at)
    if check_crc:
        if <int32_t>(crc_of(data + body_at, body_bytes) & CRC_MASK) != _i32(data + 8):
            return WALK_CORRUPT
        if topic_bytes and memchr(data + topic_at, 0, topic_bytes) != NULL:
            return WALK_CORRUPT
        if fields.store_ms >= whole_ms and _lost_sector(view, at + properties_at, at + size):
            return WALK_CORRUPT
    fields.queue_id = _i32(data + 12)
    fields.queue_offset = _i64(data + 20)
    fields.sys_flag = sys_flag
    fields.topic = data + topic_at
    fields.topic_bytes = topic_bytes
    fields.properties = data + properties_at
    fields.properties_bytes = size - properties_at
    size_out[0] = size
    return WALK_MORE


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
