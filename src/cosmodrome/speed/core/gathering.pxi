# Part of native.pyx: what queues and index need of many records (the twin: records.py).

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


cdef _Run _run_of(dict by_bytes, dict by_name, bytes queue_key, Fields *fields):
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
    by_bytes[queue_key] = run
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
    cdef int why = WALK_MORE
    cdef int32_t kind
    cdef const uint8_t *data
    cdef Py_ssize_t before
    cdef uint8_t *to
    cdef uint8_t *end_of_keys
    cdef Fields fields
    cdef Facts facts
    cdef bytes queue_key
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
            if why != WALK_MORE:
                break
            met = &near[fields.queue_id & (NEAR - 1)]
            if (
                met.topic != NULL and fields.queue_id == met.queue_id
                and fields.topic_bytes == met.topic_bytes
                and memcmp(fields.topic, met.topic, met.topic_bytes) == 0
            ):
                run = <_Run>met.run
            else:
                queue_key = PyBytes_FromStringAndSize(NULL, fields.topic_bytes + 4)
                to = <uint8_t *>PyBytes_AS_STRING(queue_key)
                to = _put32(to, <uint32_t>fields.queue_id)
                _put(to, fields.topic, fields.topic_bytes)
                run = by_bytes.get(queue_key)
                if run is None:
                    run = _run_of(by_bytes, by_name, queue_key, &fields)
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


cdef class _KnownEnd:
    """What is kept of a queue between two calls of `gather_next`."""

    cdef QueueEnd queue_end
    cdef uint32_t prefix  # hash of "topic#"


cdef struct NearEnd:
    const uint8_t *topic
    Py_ssize_t topic_bytes
    int32_t queue_id
    uint32_t prefix
    Py_ssize_t run


cdef struct NextEntry:
    Py_ssize_t run
    int64_t log_offset
    int64_t tags_code
    int32_t size


# Every call has its own mark, and none of those that a lane gives to queue ends.
cdef uint64_t _takings = <uint64_t>1 << 63


cdef _KnownEnd _known_end(dict known, Fields *fields, queue_end):
    """The end of a record's queue; None when the record needs a closer look."""
    cdef bytes key = PyBytes_FromStringAndSize(NULL, fields.topic_bytes + 4)
    cdef uint8_t *to = <uint8_t *>PyBytes_AS_STRING(key)
    cdef _KnownEnd found
    cdef str topic
    _put(_put32(to, <uint32_t>fields.queue_id), fields.topic, fields.topic_bytes)
    found = known.get(key)
    if found is not None and found.queue_end.next >= 0:
        return found
    topic = _text(fields.topic, fields.topic_bytes)
    if topic == pure.SCHEDULE_TOPIC:
        return None
    found = _KnownEnd()
    try:
        found.queue_end = <QueueEnd?>queue_end(topic, fields.queue_id)
    except StoreError:
        return None
    found.prefix = _prefix(topic)
    known[key] = found
    return found


cdef void *_room_for(void *data, Py_ssize_t *room, Py_ssize_t wanted) except NULL:
    """Memory for `wanted` bytes; what was there stays."""
    cdef void *grown
    if data != NULL and wanted <= room[0]:
        return data
    grown = PyMem_Realloc(data, 2 * wanted)
    if grown == NULL:
        raise MemoryError
    room[0] = 2 * wanted
    return grown


def gather_next(
    view, int64_t base, end, int64_t whole_ms, dict known not None, queue_end, list undo not None
):
    global _takings
    cdef Py_buffer buffer
    cdef Py_ssize_t at = 0
    cdef Py_ssize_t stop, size, number
    cdef Py_ssize_t count = 0
    cdef Py_ssize_t keys_bytes = 0
    cdef Py_ssize_t keys_room = 0
    cdef Py_ssize_t entries_room = 0
    cdef int64_t last_ms = 0
    cdef int32_t kind
    cdef uint64_t mark
    cdef uint8_t *keys = NULL
    cdef NextEntry *entries = NULL
    cdef NearEnd near[NEAR]  # queues that were met lately
    cdef NearEnd *met
    cdef OneRun *one
    cdef Fields fields
    cdef Facts facts
    cdef _KnownEnd found
    cdef QueueEnd to
    cdef Runs runs = Runs()
    if not 0 <= end <= len(view):
        raise ValueError(f"walk from 0 to {end} outside a view of {len(view)} bytes")
    stop = end
    _takings += 1
    mark = _takings
    memset(near, 0, sizeof(near))
    PyObject_GetBuffer(view, &buffer, PyBUF_SIMPLE)
    try:
        while at < stop:
            if _record(
                <const uint8_t *>buffer.buf, base, at, stop, True, whole_ms, &fields, &size
            ) != WALK_MORE:
                break
            kind = fields.sys_flag & SYS_TRANSACTION_MASK
            if kind == SYS_PREPARED or kind == SYS_ROLLBACK:
                break
            if not 0 <= fields.queue_offset <= QUEUE_OFFSET_LIMIT:
                break
            met = &near[fields.queue_id & (NEAR - 1)]
            if (
                met.topic == NULL or fields.queue_id != met.queue_id
                or fields.topic_bytes != met.topic_bytes
                or memcmp(fields.topic, met.topic, met.topic_bytes) != 0
            ):
                found = _known_end(known, &fields, queue_end)
                if found is None:
                    break
                to = found.queue_end
                if to.mark != mark:
                    if to.next != fields.queue_offset:
                        break
                    to.run = runs.add(to)
                    to.mark = mark
                met[0] = NearEnd(
                    fields.topic, fields.topic_bytes, fields.queue_id, found.prefix, to.run
                )
            one = &runs.runs[met.run]
            if one.first + one.count != fields.queue_offset:
                break
            _read_facts(fields.properties, fields.properties_bytes, &facts)
            keys = <uint8_t *>_room_for(
                keys, &keys_room, keys_bytes + (_keys_max(&facts) + 1) * INDEX_KEY_BYTES
            )
            keys_bytes = _put_keys(
                keys + keys_bytes, <PyObject *>(<QueueEnd>one.queue_end).key[0], met.prefix, &facts,
                fields.log_offset, fields.store_ms,
            ) - keys
            entries = <NextEntry *>_room_for(
                entries, &entries_room, (count + 1) * sizeof(NextEntry)
            )
            entries[count] = NextEntry(met.run, fields.log_offset, _tags_code(&facts), size)
            one.count += 1
            last_ms = fields.store_ms
            count += 1
            at += size
        if count:
            runs.allot()
            for number in range(count):
                one = &runs.runs[entries[number].run]
                one.to = _put64(one.to, <uint64_t>entries[number].log_offset)
                one.to = _put32(one.to, <uint32_t>entries[number].size)
                one.to = _put64(one.to, <uint64_t>entries[number].tags_code)
            undo.append(runs.put_back)
            for number in range(runs.count):
                one = &runs.runs[number]
                (<QueueEnd>one.queue_end).next = one.first + one.count
        return runs, PyBytes_FromStringAndSize(<char *>keys, keys_bytes), count, last_ms, at
    finally:
        PyBuffer_Release(&buffer)
        PyMem_Free(keys)
        PyMem_Free(entries)
