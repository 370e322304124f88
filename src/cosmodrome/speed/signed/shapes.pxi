# Part of native.pyx: headers that repeat an earlier one but for a few values.
#
# The sends of one producer differ in opaque, signature, topic, queue, born time and properties. When
# one of them was proven in the ordinary way, a Shape keeps the text of its header between those values,
# and what is signed between them. A header with the same text around values that are nothing but
# themselves has the same fields with other values, so it need not be read. Values beyond ASCII, and
# escapes in other places than values, are left to the ordinary way.

cdef enum:
    SHAPES = 16
    SHAPE_BYTES_MAX = 1024  # of a header that is remembered
    HOLES_MAX = 8
    HOLE_OPAQUE = -1  # what a hole is for; else the number of its field in the order of names


cdef struct Hole:
    int field
    Py_ssize_t text_bytes  # of the header, before it
    const uint8_t *learned  # where it was; of no use later
    Py_ssize_t size  # what it had; in a binary header it has the same again


cdef struct Shape:
    int serialize
    int32_t code
    int count
    Hole holes[HOLES_MAX]  # in the order of the header
    Py_ssize_t text_bytes
    int order[HOLES_MAX]  # holes in the order of their names, without opaque
    Py_ssize_t before[HOLES_MAX]  # of what is signed, before each of these
    int signed_count
    int signature  # the holes of these
    int asked
    Py_ssize_t signed_bytes
    uint8_t text[SHAPE_BYTES_MAX]  # the header without its holes
    uint8_t signed[SHAPE_BYTES_MAX]  # what is signed without them


cdef inline bint _varies(Name *name) noexcept nogil:
    """Whether a field of a send with short names differs from one to the next."""
    cdef uint8_t letter = name.at[0]
    if name.size == 1:
        return letter == 98 or letter == 101 or letter == 103 or letter == 105  # b, e, g, i
    return _same_name(name, &SIGNATURE)


cdef bint _add_hole(Shape *shape, int field, const uint8_t *at, Py_ssize_t size) noexcept nogil:
    """A hole among the others, in the order of the header."""
    cdef int number = shape.count
    if number == HOLES_MAX:
        return False
    while number and shape.holes[number - 1].learned > at:
        shape.holes[number] = shape.holes[number - 1]
        number -= 1
    shape.holes[number].field = field
    shape.holes[number].learned = at
    shape.holes[number].size = size
    shape.count += 1
    return True


cdef bint _learn(
    Shape *shape, int serialize, const uint8_t *header, Py_ssize_t size, Fields *fields, Asked *asked,
    const uint8_t *signed, Py_ssize_t signed_bytes
) noexcept nogil:
    """Make the shape of a header that was proven; False if it has none."""
    cdef const uint8_t *at = header
    cdef uint8_t *to = shape.text
    cdef Field *field
    cdef int index, number
    shape.count = shape.signed_count = 0
    shape.signature = shape.asked = -1
    shape.serialize = serialize
    shape.code = fields.code
    if (
        size > SHAPE_BYTES_MAX or fields.opaque == NULL or fields.twice or asked.count != 1
        or not (fields.code == CODE_SEND_V2 or fields.code == CODE_SEND_BATCH)
        or not _add_hole(shape, HOLE_OPAQUE, fields.opaque, fields.opaque_bytes)
    ):
        return False
    for index in range(fields.count):
        field = &fields.all[index]
        if _varies(&field.name):
            if serialize == SERIALIZE_JSON and (field.value - 1)[0] != 34:
                return False
            if not _add_hole(shape, index, field.value, field.value_bytes):
                return False
    for number in range(shape.count):
        shape.holes[number].text_bytes = shape.holes[number].learned - at
        memcpy(to, at, shape.holes[number].text_bytes)
        to += shape.holes[number].text_bytes
        at = shape.holes[number].learned + shape.holes[number].size
    memcpy(to, at, header + size - at)
    shape.text_bytes = to + (header + size - at) - shape.text
    return _learn_signed(shape, fields, asked, signed, signed_bytes)


cdef bint _learn_signed(
    Shape *shape, Fields *fields, Asked *asked, const uint8_t *signed, Py_ssize_t signed_bytes
) noexcept nogil:
    """The other half of `_learn`: what is signed, cut where the holes are."""
    cdef const uint8_t *end = signed + signed_bytes
    cdef uint8_t *to = shape.signed
    cdef Field *field
    cdef Py_ssize_t before = 0
    cdef int index, number
    for index in range(fields.count):
        field = &fields.all[index]
        for number in range(shape.count):
            if shape.holes[number].field == index:
                break
        else:
            if not _is_unsigned(&field.name):
                memcpy(to, signed, field.signed_bytes)
                to += field.signed_bytes
                signed += field.signed_bytes
                before += field.signed_bytes
            continue
        if _same_name(&field.name, &SIGNATURE):
            shape.signature = number
            continue
        if _same_name(&field.name, &asked.names[0]):
            shape.asked = shape.signed_count
        shape.order[shape.signed_count] = number
        shape.before[shape.signed_count] = before
        shape.signed_count += 1
        signed += field.signed_bytes
        before = 0
    shape.signed_bytes = to - shape.signed
    return shape.signature >= 0 and shape.asked >= 0 and signed == end


cdef extern from *:
    """
    #ifdef __SSE2__
    #include <emmintrin.h>
    #endif

    /* A call of memcmp costs more than most texts between values, which are a few bytes. */
    static inline int same_bytes(const uint8_t *one, const uint8_t *other, size_t size) {
        uint64_t a, b, c, d;
        if (size > 64)
            return memcmp(one, other, size) == 0;
        if (size < 8) {
            for (; size; one++, other++, size--)
                if (*one != *other)
                    return 0;
            return 1;
        }
        for (; size > 8; one += 8, other += 8, size -= 8) {
            memcpy(&a, one, 8);
            memcpy(&b, other, 8);
            if (a != b)
                return 0;
            if (size < 16) {  /* some of these were compared before */
                one -= 16 - size;
                other -= 16 - size;
                size = 16;
            }
        }
        memcpy(&c, one, 8);
        memcpy(&d, other, 8);
        return c == d;
    }

    /* The first quote, backslash, control character or byte beyond ASCII, or the end. */
    static inline const uint8_t *plain_stop(const uint8_t *at, const uint8_t *end) {
    #ifdef __SSE2__
        const __m128i quote = _mm_set1_epi8(34), slash = _mm_set1_epi8(92),
                      blank = _mm_set1_epi8(32);
        for (; end - at >= 16; at += 16) {
            __m128i some = _mm_loadu_si128((const __m128i *)at);
            __m128i found = _mm_or_si128(_mm_cmpeq_epi8(some, quote), _mm_cmpeq_epi8(some, slash));
            found = _mm_or_si128(found, _mm_cmpgt_epi8(blank, some));  /* beyond ASCII: negative */
            int mask = _mm_movemask_epi8(found);
            if (mask)
                return at + __builtin_ctz(mask);
        }
    #endif
        while (at < end && *at != 34 && *at != 92 && *at >= 32 && *at < 128)
            at++;
        return at;
    }
    """
    bint same_bytes(const uint8_t *one, const uint8_t *other, size_t size) noexcept nogil
    const uint8_t *plain_stop(const uint8_t *at, const uint8_t *end) noexcept nogil


cdef bint _fits(
    Shape *shape, const uint8_t *at, const uint8_t *end, Field *found
) noexcept nogil:
    """Whether a header has this shape, and what is in its holes."""
    cdef const uint8_t *text = shape.text
    cdef const uint8_t *stop
    cdef Hole *hole
    cdef Py_ssize_t size
    cdef int64_t opaque = 0
    cdef int number
    cdef bint escaped = False
    for number in range(shape.count):
        hole = &shape.holes[number]
        size = hole.text_bytes
        if end - at < size or not same_bytes(at, text, size):
            return False
        at += size
        text += size
        if shape.serialize == SERIALIZE_BINARY:
            stop = at + hole.size
            if stop > end or (hole.field != HOLE_OPAQUE and has_high(at, hole.size)):
                return False
        elif hole.field == HOLE_OPAQUE:
            stop = _int_end(at, end, &opaque)
            if stop == NULL or opaque > 0x7FFFFFFFLL or opaque < 0:
                return False
        else:
            stop = plain_stop(at, end)
            while end - stop >= 2 and stop[0] == 92:
                escaped = True
                stop = plain_stop(stop + 2, end)
            if stop == end or stop[0] != 34:
                return False
        found[number].value = at
        found[number].value_bytes = stop - at
        found[number].escaped = escaped
        escaped = False
        at = stop
    size = shape.text + shape.text_bytes - text
    return end - at == size and same_bytes(at, text, size)


cdef bint _fill(
    Shape *shape, Field *found, uint8_t *scratch, const uint8_t *readable, Parts *parts
) noexcept nogil:
    """What is signed in a header of this shape; False if a value is unusual."""
    cdef const uint8_t *signed = shape.signed
    cdef const uint8_t *signed_end = shape.signed + SHAPE_BYTES_MAX
    cdef uint8_t *to = scratch
    cdef Py_ssize_t size
    cdef int number
    size = _copy_value(&found[shape.signature], to, readable)
    if size != SIGNATURE_BYTES:
        return False
    memcpy(parts.signature, to, SIGNATURE_BYTES)
    for number in range(shape.signed_count):
        size = shape.before[number]
        _copy(to, signed, size, signed_end)
        to += size
        signed += size
        size = _copy_value(&found[shape.order[number]], to, readable)
        if size < 0:
            return False
        if number == shape.asked:
            parts.asked[0] = to
            parts.asked_bytes[0] = size
        to += size
    size = shape.signed + shape.signed_bytes - signed
    _copy(to, signed, size, signed_end)
    parts.size = to + size - scratch
    return True
