# Part of native.pyx: headers of requests as clients write them, JSON and binary (the twin: heads.py).

cdef inline bint _same(const uint8_t *at, Py_ssize_t size, const char *word, Py_ssize_t word_size) noexcept nogil:
    return size == word_size and memcmp(at, word, word_size) == 0


cdef int _slot(int32_t code, const uint8_t *at, Py_ssize_t size) noexcept nogil:
    """The number of a header field among those of its request, -1 for others."""
    if code == CODE_SEND_V2 or code == CODE_SEND_BATCH:
        if size == 1:
            return at[0] - 97 if 97 <= at[0] <= 110 else -1
        return SLOT_SIGNATURE if _same(at, size, "Signature", 9) else -1
    if code == CODE_SEND:
        if size == 5:
            if _same(at, size, "topic", 5):
                return 1
            if _same(at, size, "batch", 5):
                return 12
            return 13 if _same(at, size, "bname", 5) else -1
        if _same(at, size, "producerGroup", 13):
            return 0
        if _same(at, size, "defaultTopic", 12):
            return 2
        if _same(at, size, "defaultTopicQueueNums", 21):
            return 3
        if _same(at, size, "queueId", 7):
            return 4
        if _same(at, size, "sysFlag", 7):
            return 5
        if _same(at, size, "bornTimestamp", 13):
            return 6
        if _same(at, size, "flag", 4):
            return 7
        if _same(at, size, "properties", 10):
            return 8
        if _same(at, size, "reconsumeTimes", 14):
            return 9
        if _same(at, size, "unitMode", 8):
            return 10
        if _same(at, size, "maxReconsumeTimes", 17):
            return 11
        return SLOT_SIGNATURE if _same(at, size, "Signature", 9) else -1
    if _same(at, size, "consumerGroup", 13):
        return 0
    if _same(at, size, "topic", 5):
        return 1
    if _same(at, size, "queueId", 7):
        return 2
    if _same(at, size, "commitOffset", 12):
        return 3
    if code == CODE_COMMIT:
        return -1
    if _same(at, size, "queueOffset", 11):
        return 4
    if _same(at, size, "maxMsgNums", 10):
        return 5
    if _same(at, size, "sysFlag", 7):
        return 6
    if _same(at, size, "suspendTimeoutMillis", 20):
        return 7
    if _same(at, size, "subVersion", 10):
        return 8
    if _same(at, size, "subscription", 12):
        return 9
    if _same(at, size, "expressionType", 14):
        return 10
    return 11 if _same(at, size, "maxMsgBytes", 11) else -1


cdef inline bint _ours(int64_t code) noexcept nogil:
    return (
        code == CODE_SEND_V2 or code == CODE_PULL or code == CODE_SEND_BATCH
        or code == CODE_SEND or code == CODE_COMMIT
    )


cdef extern from *:
    """
    /* Whether `"?":"` is there, 8 bytes before an end. */
    static inline int short_name(const uint8_t *at) {
        const uint8_t looked_at[8] = {255, 0, 255, 255, 255}, wanted[8] = {34, 0, 34, 58, 34};
        uint64_t some, mask, name;
        memcpy(&some, at, 8);
        memcpy(&mask, looked_at, 8);
        memcpy(&name, wanted, 8);
        return (some & mask) == name;
    }
    """
    bint short_name(const uint8_t *at) noexcept nogil


cdef inline const uint8_t *_word_end(
    const uint8_t *at, const uint8_t *end, const char *word, Py_ssize_t size
) noexcept nogil:
    """Behind a word; NULL when it is not there."""
    return at + size if end - at >= size and memcmp(at, word, size) == 0 else NULL


cdef inline const uint8_t *_value_at(
    const uint8_t *at, const uint8_t *end, const uint8_t **name, Py_ssize_t *name_bytes
) noexcept nogil:
    """Where the value of a member begins, and what its name is; NULL if unusual."""
    cdef bint escaped = False
    at = _past_blanks(at, end)
    if at >= end or at[0] != 34:
        return NULL
    name[0] = at + 1
    at = _span_end(at + 1, end, &escaped)
    if at == NULL or escaped:
        return NULL
    name_bytes[0] = at - name[0]
    at = _past_blanks(at + 1, end)
    if at >= end or at[0] != 58:
        return NULL
    at = _past_blanks(at + 1, end)
    return at if at < end else NULL


cdef const uint8_t *_read_fields(const uint8_t *at, const uint8_t *end, Head *head) noexcept nogil:
    """The fields of a request, from their brace on; where they end, NULL if unusual."""
    cdef const uint8_t *name = NULL
    cdef const uint8_t *value
    cdef Py_ssize_t name_bytes = 0
    cdef Py_ssize_t size
    cdef bint escaped = False
    cdef bint short_names = head.code == CODE_SEND_V2 or head.code == CODE_SEND_BATCH
    cdef uint8_t byte
    cdef int64_t number = 0
    cdef int slot
    if at[0] != 123:
        return NULL
    at = _past_blanks(at + 1, end)
    if at < end and at[0] == 125:
        return at + 1
    while True:
        if short_names and end - at >= 8 and short_name(at) and 97 <= at[1] <= 110:
            slot = at[1] - 97
            value = at + 5
            at = _span_end(value, end, &escaped)
            if at == NULL:
                return NULL
            size = at - value
            at += 1
        else:
            at = _value_at(at, end, &name, &name_bytes)
            if at == NULL:
                return NULL
            slot = _slot(head.code, name, name_bytes)
            byte = at[0]
            value = at + (byte == 34)
            escaped = False
            if byte == 34:
                at = _span_end(value, end, &escaped)
            elif byte == 45 or 48 <= byte <= 57:
                at = _int_end(at, end, &number)
            elif byte == 116:
                at = _word_end(at, end, "true", 4)
            else:
                at = _word_end(at, end, "false", 5)
            if at == NULL:
                return NULL
            size = at - value
            at += byte == 34
        if escaped and (slot != 8 or head.code == CODE_PULL):
            return NULL
        if slot >= 0:
            if head.fields[slot].escaped:  # the slow lane looks at all escapes, not the last only
                return NULL
            head.fields[slot].at = value
            head.fields[slot].size = <int32_t>size
            head.fields[slot].escaped = escaped
        at = _past_blanks(at, end)
        if at >= end:
            return NULL
        byte = at[0]
        at += 1
        if byte == 125:
            return at
        if byte != 44:
            return NULL


cdef bint _read_json(const uint8_t *at, Py_ssize_t size, Head *head):
    """A header in the shape clients write, its code before its fields; False otherwise."""
    cdef const uint8_t *end = at + size
    cdef const uint8_t *name = NULL
    cdef const uint8_t *value
    cdef Py_ssize_t name_bytes = 0
    cdef bint escaped = False
    cdef bint has_code = False
    cdef bint has_fields = False
    cdef int64_t number = 0
    cdef uint8_t byte
    if has_high(at, size) and not _is_utf8(at, size):
        return False
    head.opaque = head.flag = 0
    head.opaque_at = NULL
    memset(head.fields, 0, sizeof(head.fields))
    at = _past_blanks(at, end)
    if at >= end or at[0] != 123:
        return False
    at += 1
    while True:
        at = _value_at(at, end, &name, &name_bytes)
        if at == NULL:
            return False
        byte = at[0]
        if byte == 45 or 48 <= byte <= 57:
            value = at
            at = _int_end(at, end, &number)
            if at == NULL or number < -0x80000000LL or number > 0x7FFFFFFFLL:
                return False
            if _same(name, name_bytes, "opaque", 6):
                head.opaque = <int32_t>number
                head.opaque_at = value
                head.opaque_bytes = <int32_t>(at - value)
            elif _same(name, name_bytes, "flag", 4):
                head.flag = <int32_t>number
            elif _same(name, name_bytes, "code", 4):
                if has_code or not _ours(number):
                    return False
                has_code = True
                head.code = <int32_t>number
            elif not (
                _same(name, name_bytes, "version", 7) or _same(name, name_bytes, "language", 8)
            ):
                return False
        elif byte == 34:
            if not (
                _same(name, name_bytes, "language", 8) or _same(name, name_bytes, "remark", 6)
                or _same(name, name_bytes, "serializeTypeCurrentRPC", 23)
            ):
                return False
            at = _span_end(at + 1, end, &escaped)
            if at == NULL or escaped:
                return False
            at += 1
        elif byte == 123:
            if not has_code or not _same(name, name_bytes, "extFields", 9):
                return False
            if has_fields:  # the last ones count
                if head.fields[8].escaped:
                    return False
                memset(head.fields, 0, sizeof(head.fields))
            has_fields = True
            at = _read_fields(at, end, head)
            if at == NULL:
                return False
        else:
            at = _word_end(at, end, "null", 4)
            if at == NULL or not _same(name, name_bytes, "remark", 6):
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
    return has_code and _past_blanks(at, end) == end


cdef bint _read_binary(const uint8_t *at, Py_ssize_t size, Head *head) noexcept nogil:
    cdef const uint8_t *end = at + size
    cdef const uint8_t *name
    cdef Py_ssize_t name_bytes, value_bytes
    cdef int slot
    memset(head.fields, 0, sizeof(head.fields))
    if size < BINARY_HEADER_BYTES + 4:
        return False
    head.code = _i16(at)
    if not _ours(head.code):
        return False
    head.opaque = _i32(at + 5)
    head.opaque_at = at + 5
    head.opaque_bytes = 4
    head.flag = _i32(at + 9)
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
            slot = _slot(head.code, name, name_bytes)
            if slot >= 0:
                head.fields[slot].at = at
                head.fields[slot].size = <int32_t>value_bytes
        at += value_bytes
    return True


cdef bint _read_head(const uint8_t *at, Py_ssize_t length, Head *head, const uint8_t **body, Py_ssize_t *body_bytes):
    """A frame's header, from its second word on, if it is a request of ours."""
    cdef uint32_t word = <uint32_t>_i32(at)
    cdef Py_ssize_t header_bytes = word & 0xFFFFFF
    cdef int index
    head.serialize = word >> 24
    head.start = at + 4
    if header_bytes > length - 4:
        return False
    if head.serialize == SERIALIZE_JSON:
        if not _read_json(at + 4, header_bytes, head):
            return False
    elif head.serialize != SERIALIZE_BINARY or not _read_binary(at + 4, header_bytes, head):
        return False
    body[0] = at + 4 + header_bytes
    body_bytes[0] = length - 4 - header_bytes
    return not head.flag & FLAG_RESPONSE


cdef extern from *:
    """
    /* The number that eight digits are; 0 when they are not digits. */
    static inline int eight_digits(const uint8_t *at, uint64_t *number) {
    #if defined(__GNUC__) && __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__
        const uint64_t high = 0xF0F0F0F0F0F0F0F0u, zeros = 0x3030303030303030u;
        uint64_t some;
        memcpy(&some, at, 8);
        if ((some & high) != zeros || ((some + 0x0606060606060606u) & high) != zeros)
            return 0;
        some = (some - zeros) * 2561 >> 8;  /* tens and ones, then pairs of them, then fours */
        some = (some & 0x00FF00FF00FF00FFu) * 6553601 >> 16;
        *number = (some & 0x0000FFFF0000FFFFu) * 42949672960001u >> 32;
    #else
        uint64_t total = 0;
        for (int index = 0; index < 8; index++) {
            if (at[index] < 48 || at[index] > 57)
                return 0;
            total = total * 10 + (at[index] - 48);
        }
        *number = total;
    #endif
        return 1;
    }
    """
    bint eight_digits(const uint8_t *at, uint64_t *number) noexcept nogil


cdef bint _long_number(Text *text, int64_t *value) noexcept nogil:
    cdef const uint8_t *at = text.at
    cdef const uint8_t *end
    cdef uint64_t eight = 0
    cdef int64_t total = 0
    cdef bint negative
    if at == NULL or text.size == 0 or text.escaped:
        return False
    end = at + text.size
    negative = at[0] == 45
    if negative:
        at += 1
    while end - at > 1 and at[0] == 48:
        at += 1
    if at == end or end - at > 18 or (at[0] == 48 and negative):
        return False
    while end - at >= 8:
        if not eight_digits(at, &eight):
            return False
        total = total * 100_000_000 + <int64_t>eight
        at += 8
    while at < end:
        if not 48 <= at[0] <= 57:
            return False
        total = total * 10 + (at[0] - 48)
        at += 1
    value[0] = -total if negative else total
    return True


cdef inline bint _number32(Text *text, int32_t *value) noexcept nogil:
    cdef int64_t wide = 0
    if not _number(text, &wide) or wide < -0x80000000LL or wide > 0x7FFFFFFFLL:
        return False
    value[0] = <int32_t>wide
    return True


cdef inline bint _truth(Text *text, bint *value) noexcept nogil:
    if _same(text.at, text.size, "true", 4):
        value[0] = True
        return True
    value[0] = False
    return _same(text.at, text.size, "false", 5)


cdef bint _null(const uint8_t *at, Py_ssize_t size) noexcept nogil:
    """Whether the slow lane might take this text for nothing at all."""
    return size == 4 and (at[0] | 32) == 110 and (at[1] | 32) == 117 and (at[2] | 32) == 108


cdef _string(Text *text):
    """The text, None unless it is plain UTF-8."""
    if text.at == NULL or text.escaped or not _is_utf8(text.at, text.size):
        return None
    return PyUnicode_DecodeUTF8(<const char *>text.at, text.size, NULL)


cdef Py_ssize_t _frame(const uint8_t *at, Py_ssize_t left) noexcept nogil:
    """What the length word says; 0 when the frame is not whole, -1 when it is impossible."""
    cdef int64_t length
    if left < 4:
        return 0
    length = <uint32_t>_i32(at)
    if length < 4 or length > FRAME_BYTES_MAX - 4:
        return -1
    if left >= 8 and (_i32(at + 4) & 0xFFFFFF) > HEADER_BYTES_MAX:
        return -1
    return <Py_ssize_t>length if left - 4 >= length else 0
