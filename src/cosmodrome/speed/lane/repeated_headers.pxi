# Part of native.pyx: headers that repeat an earlier one but for a few values (the twin: repeated_headers.py).
#
# The headers of one producer differ in few values, the topic among them. When one was read and taken
# in the ordinary way a Shape keeps the text between those values. A header with the same text around values that cannot
# mean anything but themselves (digits; ASCII without quotes, escapes and control characters) is
# what that one was with other values, and need not be read. In a binary header the text around a
# value tells its length, so there that stays the same too.


cdef extern from *:
    """
    #ifdef __SSE2__
    #include <emmintrin.h>
    #endif

    /* The first byte from `at` on that parts properties (or is 0), or the end. What is read lies
       behind `begin`. */
    static inline const uint8_t *parting(
        const uint8_t *begin, const uint8_t *at, const uint8_t *end
    ) {
    #ifdef __SSE2__
        const __m128i low = _mm_set1_epi8(2);
        for (; end - at >= 16; at += 16) {
            __m128i some = _mm_loadu_si128((const __m128i *)at);
            unsigned mask = _mm_movemask_epi8(_mm_cmpeq_epi8(_mm_min_epu8(some, low), some));
            if (mask)
                return at + __builtin_ctz(mask);
        }
        if (end - begin >= 16) {
            __m128i some = _mm_loadu_si128((const __m128i *)(end - 16));
            unsigned mask = _mm_movemask_epi8(_mm_cmpeq_epi8(_mm_min_epu8(some, low), some));
            mask >>= 16 - (end - at);
            return mask ? at + __builtin_ctz(mask) : end;
        }
    #endif
        while (at < end && *at > 2)
            at++;
        return at;
    }
    """
    const uint8_t *parting(
        const uint8_t *begin, const uint8_t *at, const uint8_t *end
    ) noexcept nogil


cdef enum:
    SHAPES = 8
    SHAPE_BYTES_MAX = 1024  # of a header that is remembered
    HOLES_MAX = 16
    CREDIT_MAX = 256  # remembering costs as much as reading some headers: it has to be earned
    REMEMBER_COST = 8
    CREDIT_EVERY = 256  # headers that were not known, until it is tried again

cdef enum:  # what a hole is for; those before TOPIC are numbers, those from VALUE on properties
    HOLE_QUEUE_ID = 0
    HOLE_BORN_MS = 1
    HOLE_OPAQUE = 2
    HOLE_TOPIC = 3
    HOLE_SIGNATURE = 4  # which others look at
    HOLE_VALUE = 5
    HOLE_TAGS = 6
    HOLE_WORDS = 7
    HOLE_UNIQUE = 8

cdef struct Hole:
    int kind
    Py_ssize_t text_bytes  # of the header, before it
    Py_ssize_t kept_bytes  # of the stored properties, before its value
    Text learned  # what was in it; of that, only the size is valid later


cdef struct Shape:
    Hole holes[HOLES_MAX]
    Py_ssize_t count
    Py_ssize_t text_bytes
    Py_ssize_t kept_bytes
    Py_ssize_t topic_at  # in the header, if it is always the same place; else -1
    Py_ssize_t topic_bytes  # the same for its size, which only a binary header tells; else 0
    int serialize
    int32_t code
    int32_t sys_flag
    int32_t flag
    int32_t reconsume_times
    bint oneway
    bint wait
    uint8_t text[SHAPE_BYTES_MAX]  # the header without its holes
    uint8_t kept[SHAPE_BYTES_MAX]  # the properties without theirs


cdef struct Filled:
    int64_t numbers[HOLE_TOPIC]
    Text topic
    Text values[HOLES_MAX]


cdef bint _add_hole(Shape *shape, int kind, const uint8_t *at, Py_ssize_t size) noexcept nogil:
    """A hole among the others, in the order of the header."""
    cdef Py_ssize_t number = shape.count
    if number == HOLES_MAX or size < 1:
        return False
    while number and shape.holes[number - 1].learned.at > at:
        shape.holes[number] = shape.holes[number - 1]
        number -= 1
    shape.holes[number].kind = kind
    shape.holes[number].kept_bytes = 0
    shape.holes[number].learned.at = at
    shape.holes[number].learned.size = <int32_t>size
    shape.count += 1
    return True


cdef bint _add_quoted(Shape *shape, int kind, Text *text) noexcept nogil:
    """A value in quotes, if JSON: a number in a hole may begin with zeros."""
    if shape.serialize == SERIALIZE_JSON and (text.at - 1)[0] != 34:
        return False
    return _add_hole(shape, kind, text.at, text.size)


cdef inline const uint8_t *_text_end(
    Shape *shape, const uint8_t *at, const uint8_t *end
) noexcept nogil:
    """Where a text ends that means nothing but itself."""
    return parting(at, at, end) if shape.serialize == SERIALIZE_BINARY else span_stop(at, end)


cdef const uint8_t *_parting_end(
    Shape *shape, const uint8_t *at, const uint8_t *end, uint8_t byte
) noexcept nogil:
    """Behind what parts properties, a byte or its escape; NULL when it is not there."""
    if shape.serialize == SERIALIZE_BINARY:
        return at + 1 if at < end and at[0] == byte else NULL
    if byte == 1:
        return _word_end(at, end, "\\u0001", 6)
    return _word_end(at, end, "\\u0002", 6)


cdef bint _add_values(Shape *shape, Text *text) noexcept nogil:
    """The values of properties, as they stand in a header, but for what the lane acts on."""
    cdef const uint8_t *at = text.at
    cdef const uint8_t *end = at + text.size
    cdef const uint8_t *value
    cdef const uint8_t *stop
    cdef const uint8_t *next_at
    cdef uint8_t *kept = shape.kept
    cdef Py_ssize_t name_bytes
    cdef Py_ssize_t kept_before = 0
    cdef int kind
    cdef Py_ssize_t number
    while at < end:
        stop = _text_end(shape, at, end)
        name_bytes = stop - at
        value = _parting_end(shape, stop, end, 1)
        if value == NULL or name_bytes == 0:
            return False
        stop = _text_end(shape, value, end)
        next_at = end if stop == end else _parting_end(shape, stop, end, 2)
        if stop == value or next_at == NULL:
            return False
        if not _same(at, name_bytes, "WAIT", 4):
            kind = HOLE_VALUE
            if _same(at, name_bytes, "TAGS", 4):
                kind = HOLE_TAGS
            elif _same(at, name_bytes, "KEYS", 4):
                kind = HOLE_WORDS
            elif _same(at, name_bytes, "UNIQ_KEY", 8):
                kind = HOLE_UNIQUE
            if not _add_hole(shape, kind, value, stop - value):
                return False
            kept = _put(kept, at, name_bytes)
            kept[0] = 1
            kept += 1
            for number in range(shape.count):
                if shape.holes[number].learned.at == value:
                    shape.holes[number].kept_bytes = kept - shape.kept - kept_before
            kept_before = kept - shape.kept
            kept[0] = 2
            kept += 1
        at = next_at
    shape.kept_bytes = kept - shape.kept
    return True


cdef bint _learn(Shape *shape, Head *head, Py_ssize_t size) noexcept nogil:
    """Make the shape of a header, of a send that was taken and is no batch; False if unusual."""
    cdef const uint8_t *at = head.start
    cdef uint8_t *to = shape.text
    cdef Hole *hole
    cdef Py_ssize_t number
    shape.count = shape.kept_bytes = 0
    shape.serialize = head.serialize
    if size > SHAPE_BYTES_MAX or head.opaque_at == NULL:
        return False
    if not (
        _add_hole(shape, HOLE_OPAQUE, head.opaque_at, head.opaque_bytes)
        and _add_quoted(shape, HOLE_TOPIC, &head.fields[1])
        and _add_quoted(shape, HOLE_QUEUE_ID, &head.fields[4])
        and _add_quoted(shape, HOLE_BORN_MS, &head.fields[6])
        and _number32(&head.fields[5], &shape.sys_flag)
        and _number32(&head.fields[7], &shape.flag)
    ):
        return False
    if head.fields[8].at != NULL and not _add_values(shape, &head.fields[8]):
        return False
    if head.fields[SLOT_SIGNATURE].at != NULL and not _add_quoted(
        shape, HOLE_SIGNATURE, &head.fields[SLOT_SIGNATURE]
    ):
        return False
    for number in range(shape.count):
        hole = &shape.holes[number]
        hole.text_bytes = hole.learned.at - at
        to = _put(to, at, hole.text_bytes)
        at = hole.learned.at + hole.learned.size
    to = _put(to, at, head.start + size - at)
    shape.text_bytes = to - shape.text
    shape.code = head.code
    shape.oneway = head.flag & FLAG_ONEWAY != 0
    shape.topic_at = -1
    shape.topic_bytes = 0
    if shape.serialize == SERIALIZE_BINARY:
        shape.topic_at = head.fields[1].at - head.start
        shape.topic_bytes = head.fields[1].size
    elif shape.holes[0].kind == HOLE_TOPIC:  # nothing that varies is before it
        shape.topic_at = shape.holes[0].text_bytes
    return True


cdef inline const uint8_t *_digits_end(
    const uint8_t *at, const uint8_t *end, int64_t *value
) noexcept nogil:
    """Behind at most 18 digits; NULL when there are more, or none."""
    cdef const uint8_t *first = at
    cdef uint64_t total = 0
    if end - at >= 8 and eight_digits(at, &total):
        at += 8
    while at < end and 48 <= at[0] <= 57:
        if at - first == 18:
            return NULL
        total = total * 10 + (at[0] - 48)
        at += 1
    value[0] = <int64_t>total
    return at if at > first else NULL


cdef bint _fits(Shape *shape, const uint8_t *at, const uint8_t *end, Filled *filled) noexcept nogil:
    """Whether a header has this shape, and what is in its holes."""
    cdef const uint8_t *text = shape.text
    cdef const uint8_t *stop
    cdef const uint8_t *hole_end
    cdef bint binary = shape.serialize == SERIALIZE_BINARY
    cdef Hole *hole
    cdef Text *value
    cdef Py_ssize_t number, size
    for number in range(shape.count):
        hole = &shape.holes[number]
        size = hole.text_bytes
        if end - at < size or memcmp(at, text, size) != 0:
            return False
        at += size
        text += size
        hole_end = end
        if binary:
            hole_end = at + hole.learned.size
            if hole_end > end:
                return False
        if hole.kind >= HOLE_TOPIC:
            stop = _text_end(shape, at, hole_end)
            if stop == at or has_high(at, stop - at):
                return False
            value = &filled.topic if hole.kind == HOLE_TOPIC else &filled.values[number]
            value.at = at
            value.size = <int32_t>(stop - at)
        elif binary and hole.kind == HOLE_OPAQUE:
            filled.numbers[HOLE_OPAQUE] = _i32(at)
            stop = hole_end
        else:
            stop = _digits_end(at, hole_end, &filled.numbers[hole.kind])
            if stop == NULL:
                return False
            if hole.kind == HOLE_OPAQUE and at[0] == 48 and stop - at > 1:
                return False
        if binary and stop != hole_end:
            return False
        at = stop
    size = shape.text + shape.text_bytes - text
    return (
        end - at == size and memcmp(at, text, size) == 0
        and filled.numbers[HOLE_OPAQUE] <= 0x7FFFFFFFLL
    )
