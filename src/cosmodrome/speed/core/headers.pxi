# Part of native.pyx: headers of frames, JSON and binary (the twin: pure.py).

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
    cdef const char *remark_text = NULL
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
        remark_text = PyUnicode_AsUTF8AndSize(remark, &remark_bytes)
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
    at = _put(at, remark_text, remark_bytes)
    at = _put32(at, <uint32_t>ext_bytes)
    if ext is not None:
        for name, value in (<dict>ext).items():
            text = PyUnicode_AsUTF8AndSize(name, &size)
            at = _put(_put16(at, <uint32_t>size), text, size)
            text = PyUnicode_AsUTF8AndSize(value, &size)
            at = _put(_put32(at, <uint32_t>size), text, size)
    return out
