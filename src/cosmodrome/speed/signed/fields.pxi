# Part of native.pyx: the fields of a header in the order of their names, and what of them is signed.

cdef struct Name:
    uint64_t front  # its first eight bytes as a number: names are in the order of these
    const uint8_t *at
    Py_ssize_t size


cdef struct Field:
    Name name
    const uint8_t *value
    Py_ssize_t value_bytes
    Py_ssize_t signed_bytes  # of the value without escapes
    bint escaped


cdef struct Fields:
    int32_t code
    int count
    bint twice  # whether a field came again
    const uint8_t *opaque  # where it stands as a number; NULL when it does not
    Py_ssize_t opaque_bytes
    Field all[FIELDS_MAX]


cdef struct Parts:  # of a signed request; places in the scratch
    Py_ssize_t size  # of the values that are signed, with which the scratch begins
    const uint8_t *key
    Py_ssize_t key_bytes
    uint8_t signature[SIGNATURE_BYTES]
    const uint8_t *asked[ASKED_MAX]
    Py_ssize_t asked_bytes[ASKED_MAX]


cdef inline uint64_t _front(const uint8_t *at, Py_ssize_t size, const uint8_t *end) noexcept nogil:
    cdef uint64_t front = 0
    if end - at >= 8:
        memcpy(&front, at, 8)
        front = BIG64(front)
        return front if size >= 8 else (front >> (64 - 8 * size) << (64 - 8 * size) if size else 0)
    memcpy(&front, at, min(size, 8))
    return BIG64(front)


cdef int _set_name(Name *name, bytes text) except -1:
    name.at = <const uint8_t *>PyBytes_AS_STRING(text)
    name.size = PyBytes_GET_SIZE(text)
    name.front = _front(name.at, name.size, name.at + name.size)
    return 0


cdef inline bint _same_name(Name *one, Name *other) noexcept nogil:
    return (
        one.front == other.front and one.size == other.size
        and (one.size <= 8 or memcmp(one.at, other.at, one.size) == 0)
    )


cdef int _compare(Name *one, Name *other) noexcept nogil:
    """Two names that begin alike."""
    cdef int order = memcmp(one.at, other.at, min(one.size, other.size))
    return order if order else (one.size > other.size) - (one.size < other.size)


cdef Name ACCESS_KEY, SIGNATURE
cdef Name UNSIGNED[ASKED_MAX]
cdef int UNSIGNED_COUNT = 0
cdef list _kept_names = [layout.ACCESS_KEY.encode(), layout.SIGNATURE.encode()]
_kept_names += [name.encode() for name in layout.UNSIGNED_FIELDS - {layout.SIGNATURE}]
_set_name(&ACCESS_KEY, _kept_names[0])
_set_name(&SIGNATURE, _kept_names[1])
for _name in _kept_names[2:]:
    _set_name(&UNSIGNED[UNSIGNED_COUNT], _name)
    UNSIGNED_COUNT += 1


cdef inline void _set_value(
    Field *field, const uint8_t *value, Py_ssize_t value_bytes, bint escaped
) noexcept nogil:
    field.value = value
    field.value_bytes = value_bytes
    field.escaped = escaped


cdef inline bint _add(
    Fields *fields, const uint8_t *name, Py_ssize_t name_bytes, const uint8_t *value,
    Py_ssize_t value_bytes, bint escaped, const uint8_t *end
) noexcept nogil:
    """One more field, among the others in order; False when there are too many.

    Compat: Java writes the fields of some binary headers twice. The last one counts.
    """
    cdef Field *all = fields.all
    cdef int place = fields.count
    cdef int order
    cdef int number
    cdef Name new
    new.at = name
    new.size = name_bytes
    new.front = _front(name, name_bytes, end)
    while place:
        if all[place - 1].name.front < new.front:
            break
        if all[place - 1].name.front == new.front:
            order = _compare(&all[place - 1].name, &new)
            if order == 0:
                _set_value(&all[place - 1], value, value_bytes, escaped)
                fields.twice = True
                return True
            if order < 0:
                break
        place -= 1
    if fields.count == FIELDS_MAX:
        return False
    for number in range(fields.count, place, -1):
        all[number] = all[number - 1]
    all[place].name = new
    _set_value(&all[place], value, value_bytes, escaped)
    fields.count += 1
    return True


cdef const uint8_t *_value_end(
    const uint8_t *at, const uint8_t *end, const uint8_t **value, Py_ssize_t *size, bint *escaped
) noexcept nogil:
    """Behind a value that is a text, a whole number or a truth; NULL if it is not."""
    cdef int64_t number = 0
    cdef uint8_t byte = at[0]
    escaped[0] = False
    value[0] = at
    if byte == 34:
        value[0] = at + 1
        at = _span_end(at + 1, end, escaped)
        if at == NULL:
            return NULL
        size[0] = at - value[0]
        return at + 1
    if byte == 45 or 48 <= byte <= 57:
        at = _int_end(at, end, &number)
    elif end - at >= 4 and memcmp(at, <const char *>"true", 4) == 0:
        at += 4
    elif end - at >= 5 and memcmp(at, <const char *>"false", 5) == 0:
        at += 5
    else:
        return NULL
    if at != NULL:
        size[0] = at - value[0]
    return at


cdef inline const uint8_t *_value_at(
    const uint8_t *at, const uint8_t *end, const uint8_t **name, Py_ssize_t *name_bytes
) noexcept nogil:
    """Where the value of a member begins, and what its name is; NULL if unusual."""
    cdef bint escaped = False
    at = _past_blanks(at, end)
    if at >= end or at[0] != 34:
        return NULL
    name[0] = at + 1
    if end - at >= 4 and at[2] == 34 and at[1] != 92 and at[1] != 34 and at[1] >= 32:
        at += 2  # most names are one letter
    else:
        at = _span_end(at + 1, end, &escaped)
        if at == NULL or escaped:
            return NULL
    name_bytes[0] = at - name[0]
    at = _past_blanks(at + 1, end)
    if at >= end or at[0] != 58:
        return NULL
    at = _past_blanks(at + 1, end)
    return at if at < end else NULL


cdef const uint8_t *_read_fields(const uint8_t *at, const uint8_t *end, Fields *fields) noexcept nogil:
    """Behind the fields of a request, from their brace on; NULL if unusual."""
    cdef const uint8_t *name = NULL
    cdef const uint8_t *value = NULL
    cdef Py_ssize_t name_bytes = 0
    cdef Py_ssize_t value_bytes = 0
    cdef bint escaped = False
    cdef uint8_t byte
    at = _past_blanks(at + 1, end)
    if at < end and at[0] == 125:
        return at + 1
    while True:
        at = _value_at(at, end, &name, &name_bytes)
        if at == NULL:
            return NULL
        at = _value_end(at, end, &value, &value_bytes, &escaped)
        if at == NULL or not _add(fields, name, name_bytes, value, value_bytes, escaped, end):
            return NULL
        at = _past_blanks(at, end)
        if at >= end:
            return NULL
        byte = at[0]
        at += 1
        if byte == 125:
            return at
        if byte != 44:
            return NULL


cdef inline bint _is(const uint8_t *at, Py_ssize_t size, const char *word, Py_ssize_t word_size) noexcept nogil:
    return size == word_size and memcmp(at, word, word_size) == 0


cdef const uint8_t *_read_member(
    const uint8_t *name, Py_ssize_t name_bytes, const uint8_t *at, const uint8_t *end, Fields *fields
) noexcept nogil:
    """Behind a member of a header other than code and fields; NULL if unusual."""
    cdef const uint8_t *value = at
    cdef int64_t number = 0
    cdef bint escaped = False
    if at[0] == 34:
        if not (
            _is(name, name_bytes, "language", 8) or _is(name, name_bytes, "remark", 6)
            or _is(name, name_bytes, "serializeTypeCurrentRPC", 23)
        ):
            return NULL
        at = _span_end(at + 1, end, &escaped)
        return NULL if at == NULL or escaped else at + 1
    if at[0] == 110:
        if end - at < 4 or memcmp(at, <const char *>"null", 4) != 0:
            return NULL
        return at + 4 if _is(name, name_bytes, "remark", 6) else NULL
    at = _int_end(at, end, &number)
    if at == NULL or number < -0x80000000LL or number > 0x7FFFFFFFLL:
        return NULL
    if _is(name, name_bytes, "opaque", 6):
        if fields.opaque != NULL:
            return NULL
        fields.opaque = value
        fields.opaque_bytes = at - value
    elif not (
        _is(name, name_bytes, "flag", 4) or _is(name, name_bytes, "version", 7)
        or _is(name, name_bytes, "language", 8)
    ):
        return NULL
    return at


cdef bint _plain_names(Fields *fields) noexcept nogil:
    cdef int index
    for index in range(fields.count):
        if has_high(fields.all[index].name.at, fields.all[index].name.size):
            return False
    return True


cdef bint _read_json(const uint8_t *at, const uint8_t *end, Fields *fields):
    """A header as clients write it; False for any other."""
    cdef const uint8_t *name = NULL
    cdef Py_ssize_t name_bytes = 0
    cdef bint has_code = False
    cdef bint has_fields = False
    cdef int64_t number = 0
    cdef uint8_t byte
    cdef bint high = has_high(at, end - at)
    if high and not _is_utf8(at, end - at):
        return False
    at = _past_blanks(at, end)
    if at >= end or at[0] != 123:
        return False
    at += 1
    while True:
        at = _value_at(at, end, &name, &name_bytes)
        if at == NULL:
            return False
        if at[0] == 123:
            if has_fields or not _is(name, name_bytes, "extFields", 9):
                return False
            has_fields = True
            at = _read_fields(at, end, fields)
        elif _is(name, name_bytes, "code", 4):
            if has_code:
                return False
            has_code = True
            at = _int_end(at, end, &number)
            if number < 0 or number > 0x7FFF:
                return False
            fields.code = <int32_t>number
        else:
            at = _read_member(name, name_bytes, at, end, fields)
        if at == NULL:
            return False
        at = _past_blanks(at, end)
        if at >= end:
            return False
        byte = at[0]
        at += 1
        if byte == 125:
            break
        if byte != 44:
            return False
    if high and not _plain_names(fields):
        return False
    return has_code and has_fields and _past_blanks(at, end) == end


cdef bint _read_binary(const uint8_t *at, const uint8_t *end, Fields *fields):
    cdef const uint8_t *name
    cdef Py_ssize_t name_bytes, value_bytes
    if end - at < BINARY_HEADER_BYTES + 4:
        return False
    fields.code = _i16(at)
    fields.opaque = at + 5
    fields.opaque_bytes = 4
    value_bytes = _i32(at + 13)
    at += BINARY_HEADER_BYTES
    if value_bytes < 0 or value_bytes > end - at - 4:
        return False
    at += value_bytes
    value_bytes = _i32(at)
    at += 4
    if value_bytes < 0 or value_bytes > end - at:
        return False
    end = at + value_bytes
    while at < end:
        if end - at < 6:
            return False
        name_bytes = _i16(at)
        if name_bytes < 0 or name_bytes > end - at - 6:
            return False
        name = at + 2
        at = name + name_bytes
        value_bytes = _i32(at)
        at += 4
        if value_bytes < 0 or value_bytes > end - at:
            return False
        if name_bytes and value_bytes:  # the slow lane does not see empty ones either
            if has_high(name, name_bytes):
                return False
            if has_high(at, value_bytes) and not _is_utf8(at, value_bytes):
                return False
            if not _add(fields, name, name_bytes, at, value_bytes, False, end):
                return False
        at += value_bytes
    return True


cdef inline void _copy(uint8_t *to, const uint8_t *at, Py_ssize_t size, const uint8_t *readable) noexcept nogil:
    """Up to SLACK bytes more may be written: what is short is copied without a call."""
    if size <= SLACK <= readable - at:
        memcpy(to, at, SLACK)
    else:
        memcpy(to, at, size)


cdef inline Py_ssize_t _copy_value(Field *field, uint8_t *to, const uint8_t *readable) noexcept nogil:
    """The value as it is signed; its size, -1 if unusual. Up to SLACK bytes more are written."""
    if field.escaped:
        return _unescape(field.value, field.value_bytes, to)
    _copy(to, field.value, field.value_bytes, readable)
    return field.value_bytes


cdef inline bint _is_unsigned(Name *name) noexcept nogil:
    """Whether a field other than the signature is not among what is signed."""
    cdef int number
    for number in range(UNSIGNED_COUNT):
        if _same_name(name, &UNSIGNED[number]):
            return True
    return False


cdef bint _sign_parts(
    Fields *fields, Name *asked, int asked_count, uint8_t *scratch, const uint8_t *readable,
    Parts *parts
) noexcept nogil:
    """What is signed, in order, and the values that matter; False when one of these is not there."""
    cdef Field *field
    cdef uint8_t *to = scratch
    cdef Py_ssize_t size
    cdef int index, number
    cdef int found = 0
    cdef bint signed = False
    parts.key = NULL
    for index in range(fields.count):
        field = &fields.all[index]
        size = _copy_value(field, to, readable)
        if size < 0:
            return False
        field.signed_bytes = size
        if field.name.size > 8:
            if _same_name(&field.name, &ACCESS_KEY):
                parts.key = to
                parts.key_bytes = size
            elif _same_name(&field.name, &SIGNATURE):
                if size != SIGNATURE_BYTES:
                    return False
                memcpy(parts.signature, to, SIGNATURE_BYTES)
                signed = True
                continue
            elif _is_unsigned(&field.name):
                continue
        for number in range(asked_count):
            if field.name.front == asked[number].front and _same_name(&field.name, &asked[number]):
                parts.asked[number] = to
                parts.asked_bytes[number] = size
                found += 1
        to += size
    parts.size = to - scratch
    return signed and parts.key != NULL and found == asked_count


cdef Py_ssize_t _put_right(uint8_t *to, int32_t code, int count, Parts *parts) noexcept nogil:
    """A code and values as one text, different for different ones."""
    cdef uint8_t *begin = to
    cdef int index
    to[0] = <uint8_t>(code >> 8)
    to[1] = <uint8_t>code
    to += 2
    for index in range(count):
        memcpy(to, parts.asked[index], parts.asked_bytes[index])
        to += parts.asked_bytes[index]
        to[0] = VALUE_END
        to += 1
    return to - begin


cdef bint _same_text(const uint8_t *digest, const uint8_t *text) noexcept nogil:
    """Whether the text is the digest in base64; takes as long whatever differs."""
    cdef const char *letters = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/"
    cdef uint32_t some
    cdef uint8_t differs = 0
    cdef int index
    for index in range(6):
        some = digest[0] << 16 | digest[1] << 8 | digest[2]
        differs |= text[0] ^ <uint8_t>letters[some >> 18]
        differs |= text[1] ^ <uint8_t>letters[some >> 12 & 63]
        differs |= text[2] ^ <uint8_t>letters[some >> 6 & 63]
        differs |= text[3] ^ <uint8_t>letters[some & 63]
        digest += 3
        text += 4
    some = digest[0] << 8 | digest[1]  # two bytes are left: three letters and a sign for the end
    differs |= text[0] ^ <uint8_t>letters[some >> 10]
    differs |= text[1] ^ <uint8_t>letters[some >> 4 & 63]
    differs |= text[2] ^ <uint8_t>letters[some << 2 & 63]
    differs |= text[3] ^ 61
    return differs == 0
