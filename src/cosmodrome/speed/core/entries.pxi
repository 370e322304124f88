# Part of native.pyx: the entries of index and queues (the twin: entries.py).

cdef enum:
    CHAIN_AHEAD = 8


cdef inline int64_t _slot_at(int32_t hashed, int64_t slot_count) noexcept nogil:
    """Where in the table the slot of a hash begins."""
    if hashed >= 0 and slot_count <= 0x7FFFFFFF:
        return 4 * <int64_t>(<uint32_t>hashed % <uint32_t>slot_count)  # far cheaper than 64 bits
    return 4 * ((hashed % slot_count + slot_count) % slot_count)


def chain(
    bytearray slots not None, bytes keys not None, int64_t count, int64_t begin_ms, int64_t limit,
    bytearray out not None, bytearray pages=None,
):
    cdef int64_t slot_count = PyByteArray_GET_SIZE(slots) // 4
    cdef int64_t slot_at
    cdef int64_t slots_at[CHAIN_AHEAD]
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
        slots_at[ahead] = _slot_at(_i32(key + ahead * INDEX_KEY_BYTES), slot_count)
        ask_for(table + slots_at[ahead])
    while taken < key_count:
        hashed = _i32(key)
        store_ms = _i64(key + 12)
        slot_at = slots_at[taken % CHAIN_AHEAD]
        slot = table + slot_at
        if taken + CHAIN_AHEAD < key_count:
            ahead = _slot_at(_i32(key + CHAIN_AHEAD * INDEX_KEY_BYTES), slot_count)
            slots_at[taken % CHAIN_AHEAD] = ahead
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
            marks[slot_at // SLOT_PAGE_BYTES] = 1
        count += 1
        taken += 1
        key += INDEX_KEY_BYTES
    return taken, fresh


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
