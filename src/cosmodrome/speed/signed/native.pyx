# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True
# cython: initializedcheck=False
"""Signed requests compiled. `pure` is the law; what is unusual in the least is not proven here.

Theory of operation. The fields of a header are noted where they stand and put in the order of their
names. Their values, without quotes and escapes, are copied behind each other; that and the body are
what the account's key makes a digest of. A header that is like one before, but for a few values, is
compared with that instead of being read. Nothing but an account whose signature was right is
remembered, so who cannot sign cannot make this module keep anything.

Unusual are names with escapes or beyond ASCII, broken text, numbers that Java would write in another
way, and more fields than any request has. Nothing is read beyond a length that was checked before.
"""

from cpython.buffer cimport PyBUF_SIMPLE, PyBuffer_Release, PyObject_GetBuffer
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from cpython.mem cimport PyMem_Calloc, PyMem_Free, PyMem_Realloc
from cpython.unicode cimport PyUnicode_DecodeUTF8
from libc.stdint cimport int32_t, int64_t, uint8_t, uint32_t, uint64_t
from libc.string cimport memcmp, memcpy, memset

import hashlib

from cosmodrome import layout
from cosmodrome.speed.core.native cimport (
    BIG64,
    _i16,
    _i32,
    _int_end,
    _is_utf8,
    _past_blanks,
    _span_end,
    _unescape,
    has_high,
)

cdef int SERIALIZE_JSON = layout.SERIALIZE_JSON
cdef int SERIALIZE_BINARY = layout.SERIALIZE_BINARY
cdef int64_t FRAME_BYTES_MAX = layout.FRAME_BYTES_MAX
cdef Py_ssize_t BINARY_HEADER_BYTES = layout.BINARY_HEADER.size
cdef Py_ssize_t HEADER_BYTES_MAX = layout.SIGNED_HEADER_BYTES_MAX
cdef Py_ssize_t RIGHTS_KEPT_MAX = layout.RIGHTS_KEPT_MAX
cdef int32_t CODE_SEND_V2 = layout.CODE_SEND_V2
cdef int32_t CODE_SEND_BATCH = layout.CODE_SEND_BATCH

cdef enum:
    FIELDS_MAX = 40  # of a request; usual ones have up to 20
    ASKED_MAX = 4  # fields that rights of one request depend on
    CODES_MAX = 8
    SLACK = 32  # bytes that a short copy may write too many
    SIGNATURE_BYTES = 28  # the digest in base64
    VALUE_END = 0xFF  # between values: no byte of UTF-8

include "sha1.pxi"
include "fields.pxi"


cdef struct Asked:  # a code that can be proven
    int32_t code
    int count
    Name names[ASKED_MAX]  # whose values say what right is needed


include "shapes.pxi"


cdef class Signer:
    """An account that can sign."""

    cdef HmacKey key
    cdef bytes name
    cdef str access_key
    cdef set allowed  # of rights as `_right` writes them
    cdef bytes last  # of them

    def __init__(self, bytes name not None, str access_key not None, bytes secret not None):
        self.name = name
        self.access_key = access_key
        self.allowed = set()
        self.last = b""
        _prepare(&self.key, secret)


cdef class Signatures:
    """Says how far the requests of a buffer are proven; see the module."""

    cdef Asked asked[CODES_MAX]
    cdef int asked_count
    cdef list names  # keeps the bytes of `asked`
    cdef object secret_of, allows
    cdef dict signers
    cdef Signer last
    cdef Shape *shapes
    cdef list shape_signers  # of these
    cdef int shape_next, shape_last  # the one to replace, the last one met
    cdef bint learned  # one in this buffer
    cdef readonly uint64_t shaped  # headers that had a known shape
    cdef uint8_t *scratch  # the values that are signed, and behind them the right
    cdef Py_ssize_t scratch_room

    def __cinit__(self):
        self.scratch = NULL
        self.shapes = NULL
        self.scratch_room = self.asked_count = self.shape_next = self.shape_last = 0

    def __init__(self, asked, secret_of, allows):
        cdef Asked *one
        if len(asked) > CODES_MAX or any(len(names) > ASKED_MAX for names in asked.values()):
            raise ValueError("more codes or fields than there is room for")
        self.secret_of = secret_of
        self.allows = allows
        self.signers = {}
        self.shape_signers = []
        self.names = []
        for code, names in asked.items():
            one = &self.asked[self.asked_count]
            one.code = code
            one.count = 0
            for name in names:
                self.names.append(name.encode())
                _set_name(&one.names[one.count], self.names[len(self.names) - 1])
                one.count += 1
            self.asked_count += 1

    def __dealloc__(self):
        PyMem_Free(self.scratch)
        PyMem_Free(self.shapes)

    def forget(self):
        self.signers.clear()
        self.shape_signers.clear()
        self.shape_next = self.shape_last = 0
        self.last = None

    def proven_end(self, view, Py_ssize_t at):
        cdef Py_buffer buffer
        cdef const uint8_t *data
        cdef const uint8_t *end
        cdef int64_t length
        cdef Py_ssize_t header_bytes
        PyObject_GetBuffer(view, &buffer, PyBUF_SIMPLE)
        try:
            end = <const uint8_t *>buffer.buf + buffer.len
            self.learned = False
            while buffer.len - at >= 8:
                data = <const uint8_t *>buffer.buf + at
                length = <uint32_t>_i32(data)
                if length < 4 or length > FRAME_BYTES_MAX - 4 or length > end - data - 4:
                    break
                header_bytes = _i32(data + 4) & 0xFFFFFF
                if header_bytes > length - 4 or header_bytes > HEADER_BYTES_MAX:
                    break
                if not self._is_proven(data[4], data + 8, header_bytes, data + 4 + length, end):
                    break
                at += 4 + length
            return at
        finally:
            PyBuffer_Release(&buffer)

    cdef bint _is_proven(
        self, int serialize, const uint8_t *header, Py_ssize_t header_bytes, const uint8_t *end,
        const uint8_t *readable
    ) except -1:
        """Whether the frame is proven whose header begins there and whose body ends at `end`."""
        cdef Fields fields
        cdef Parts parts
        cdef const uint8_t *body = header + header_bytes
        cdef Asked *asked
        cdef Signer signer = None
        cdef int known
        self._make_room(2 * header_bytes + SHAPE_BYTES_MAX)
        known = self._find_shape(serialize, header, body, readable, &parts)
        if known >= 0:
            self.shaped += 1
            asked = self._find_asked(self.shapes[known].code)
            signer = self.shape_signers[known]
            return self._check(signer, asked, &parts, body, end)
        fields.count = 0
        fields.twice = False
        fields.opaque = NULL
        if serialize == SERIALIZE_JSON:
            if not _read_json(header, body, &fields):
                return False
        elif serialize != SERIALIZE_BINARY or not _read_binary(header, body, &fields):
            return False
        asked = self._find_asked(fields.code)
        if asked == NULL:
            return False
        if not _sign_parts(&fields, asked.names, asked.count, self.scratch, readable, &parts):
            return False
        signer = self._find_signer(parts.key, parts.key_bytes)
        if signer is None or not self._check(signer, asked, &parts, body, end):
            return False
        if not self.learned:
            self._remember(serialize, header, header_bytes, &fields, asked, &parts, signer)
        return True

    cdef bint _check(
        self, Signer signer, Asked *asked, Parts *parts, const uint8_t *body, const uint8_t *end
    ) except -1:
        cdef uint8_t digest[SHA1_DIGEST]
        hmac_digest(&signer.key, self.scratch, parts.size, body, end - body, digest)
        return _same_text(digest, parts.signature) and self._may(signer, asked, parts)

    cdef int _find_shape(
        self, int serialize, const uint8_t *header, const uint8_t *end, const uint8_t *readable,
        Parts *parts
    ) noexcept:
        """The shape that a header has, with its parts; -1 when it has none."""
        cdef Field found[HOLES_MAX]
        cdef int count = <int>len(self.shape_signers)
        cdef int turn
        cdef int number = self.shape_last
        for turn in range(count):
            if self.shapes[number].serialize == serialize and _fits(
                &self.shapes[number], header, end, found
            ):
                self.shape_last = number
                if _fill(&self.shapes[number], found, self.scratch, readable, parts):
                    return number
                return -1
            number += 1
            if number >= count:
                number = 0
        return -1

    cdef int _remember(
        self, int serialize, const uint8_t *header, Py_ssize_t size, Fields *fields, Asked *asked,
        Parts *parts, Signer signer
    ) except -1:
        """Keep the shape of a header, at most one per buffer: it costs as much as reading one."""
        cdef int number = self.shape_next
        self.learned = True
        if self.shapes == NULL:
            self.shapes = <Shape *>PyMem_Calloc(SHAPES, sizeof(Shape))
            if self.shapes == NULL:
                raise MemoryError
        if not _learn(
            &self.shapes[number], serialize, header, size, fields, asked, self.scratch, parts.size
        ):
            if number < len(self.shape_signers):
                self.shapes[number].serialize = -1  # what was there is spoilt
            return 0
        if number < len(self.shape_signers):
            self.shape_signers[number] = signer
        else:
            self.shape_signers.append(signer)
        self.shape_last = number
        self.shape_next = (number + 1) % SHAPES
        return 0

    cdef Asked *_find_asked(self, int32_t code) noexcept:
        cdef int index
        for index in range(self.asked_count):
            if self.asked[index].code == code:
                return &self.asked[index]
        return NULL

    cdef Signer _find_signer(self, const uint8_t *name, Py_ssize_t size):
        cdef Signer signer = self.last
        if signer is not None and PyBytes_GET_SIZE(signer.name) == size and memcmp(
            PyBytes_AS_STRING(signer.name), name, size
        ) == 0:
            return signer
        key = PyBytes_FromStringAndSize(<const char *>name, size)
        signer = self.signers.get(key)
        if signer is None:
            text = PyUnicode_DecodeUTF8(<const char *>name, size, NULL)
            secret = self.secret_of(text)
            if secret is None:
                return None
            signer = self.signers[key] = Signer(key, text, secret)
        self.last = signer
        return signer

    cdef bint _may(self, Signer signer, Asked *asked, Parts *parts) except -1:
        """Whether the account has the right; what it is allowed to do is remembered."""
        cdef uint8_t *right = self.scratch + parts.size + SLACK
        cdef Py_ssize_t size = _put_right(right, asked.code, asked.count, parts)
        cdef bytes key
        if PyBytes_GET_SIZE(signer.last) == size and memcmp(
            PyBytes_AS_STRING(signer.last), right, size
        ) == 0:
            return True
        key = PyBytes_FromStringAndSize(<char *>right, size)
        if key not in signer.allowed:
            values = tuple([
                PyUnicode_DecodeUTF8(<const char *>parts.asked[index], parts.asked_bytes[index], NULL)
                for index in range(asked.count)
            ])
            if not self.allows(signer.access_key, asked.code, values):
                return False
            if len(signer.allowed) >= RIGHTS_KEPT_MAX:
                signer.allowed.clear()
            signer.allowed.add(key)
        signer.last = key
        return True

    cdef int _make_room(self, Py_ssize_t size) except -1:
        cdef uint8_t *more
        if self.scratch_room < size:
            more = <uint8_t *>PyMem_Realloc(self.scratch, size)
            if more == NULL:
                raise MemoryError
            self.scratch = more
            self.scratch_room = size
        return 0


cdef int _prepare(HmacKey *key, bytes secret) except -1:
    cdef uint8_t block[SHA1_BLOCK]
    if len(secret) > SHA1_BLOCK:
        secret = hashlib.sha1(secret).digest()
    memset(block, 0, SHA1_BLOCK)
    memcpy(block, PyBytes_AS_STRING(secret), len(secret))
    hmac_prepare(key, block)
    return 0


def hmac_sha1(
    bytes secret not None, bytes first not None, bytes second not None, *, bint plain,
    Py_ssize_t times=1
):
    """HMAC-SHA1 of a message in two parts; `plain` does without the processor's own rounds.

    It is made so many times with a key that is prepared once, as `Signatures` does.
    """
    cdef HmacKey key
    cdef Py_ssize_t turn
    cdef uint8_t digest[SHA1_DIGEST]
    sha1_choose(plain)
    try:
        _prepare(&key, secret)
        for turn in range(times):
            hmac_digest(
                &key, <const uint8_t *>PyBytes_AS_STRING(first), len(first),
                <const uint8_t *>PyBytes_AS_STRING(second), len(second), digest
            )
        return PyBytes_FromStringAndSize(<char *>digest, SHA1_DIGEST)
    finally:
        sha1_choose(False)


sha1_choose(False)
