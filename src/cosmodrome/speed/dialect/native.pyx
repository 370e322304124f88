# cython: language_level=3, boundscheck=False, wraparound=False
"""The reader of the JSON dialect, compiled. `pure` is the law.

It goes down by recursion, which the depth bounds, and stops at the same places for the same
reasons. Nothing is read beyond the end of the text: `here` is 0 there, which no rule accepts.
"""

from libc.stdint cimport int64_t

import math

import msgspec

from cosmodrome.errors import ProtocolError
from cosmodrome.speed.dialect.pure import BAD_OBJECT_KEY, ObjectKey, reference_path
from cosmodrome.speed.dialect import pure

cdef int DEPTH_MAX = pure.DEPTH_MAX
cdef Py_ssize_t DIGITS_MAX = pure.DIGITS_MAX
cdef Py_ssize_t SHORT_DIGITS = 18  # surely fit into 64 bits


def read(str text not None):
    cdef Reader reader = Reader()
    reader.text = text
    reader.size = len(text)
    reader.references = []
    value = reader.value(0, False)
    reader.skip()
    if reader.at != reader.size:
        reader.fail("there is more text behind the value")
    return value, reader.references


cdef class Reader:
    cdef str text
    cdef Py_ssize_t at, size
    cdef list references

    cdef object fail(self, str why):
        raise ProtocolError(f"not JSON at character {self.at}: {why}")

    cdef inline Py_UCS4 here(self) noexcept:
        return self.text[self.at] if self.at < self.size else 0

    cdef inline void skip(self) noexcept:
        cdef Py_UCS4 char
        while self.at < self.size:
            char = self.text[self.at]
            if char != 32 and char != 9 and char != 13 and char != 10:
                return
            self.at += 1

    cdef object value(self, int depth, bint in_key):
        """The value at this place, inside of `depth` containers."""
        self.skip()
        cdef Py_UCS4 char = self.here()
        if char == u"{":
            self.at += 1
            self.skip()
            if self.here() == u"}":
                self.at += 1
                return {}
            return self.members(depth, in_key)
        if char == u"[":
            self.at += 1
            self.skip()
            if self.here() == u"]":
                self.at += 1
                return []
            return self.items(depth, in_key)
        if char == u'"':
            return self.string()
        if char == u"t" and self.takes("true"):
            return True
        if char == u"f" and self.takes("false"):
            return False
        if char == u"n" and self.takes("null"):
            return None
        return self.number()

    cdef object items(self, int depth, bint in_key):
        cdef list found = []
        if depth >= DEPTH_MAX:
            self.fail(f"nested more than {DEPTH_MAX} deep")
        while True:
            value = self.value(depth + 1, in_key)
            if type(value) is dict:
                self.note(found, len(found), value, in_key)
            found.append(value)
            if self.ends(u"]"):
                return found

    cdef object members(self, int depth, bint in_key):
        cdef dict found = {}
        if depth >= DEPTH_MAX:
            self.fail(f"nested more than {DEPTH_MAX} deep")
        while True:
            key = self.key(depth + 1)
            value = self.value(depth + 1, in_key)
            if type(key) is not str or <str>key != "@type":
                if type(value) is dict:
                    self.note(found, key, value, in_key)
                found[key] = value
            if self.ends(u"}"):
                return found

    cdef bint ends(self, Py_UCS4 end) except -1:
        """Behind a member: whether it was the last one."""
        self.skip()
        cdef Py_UCS4 char = self.here()
        if char != u"," and char != end:
            self.fail(f"expected ',' or '{chr(end)}'")
        self.at += 1
        return char == end

    cdef object key(self, int depth):
        """A key and its colon."""
        self.skip()
        cdef Py_UCS4 char = self.here()
        if char == u'"':
            key = self.string()
        elif char != u"{":
            key = self.integer_key()
        else:
            self.at += 1
            self.skip()
            if self.here() == u"}":
                self.at += 1
                key = ObjectKey()
            else:
                key = self.object_key(self.members(depth, True))
        self.skip()
        if self.here() != u":":
            self.fail("expected ':' after a key")
        self.at += 1
        return key

    cdef object object_key(self, dict members):
        for name in members:
            if not isinstance(name, str):
                self.fail(BAD_OBJECT_KEY)
        try:
            return ObjectKey.of(members)
        except TypeError:
            self.fail(BAD_OBJECT_KEY)

    cdef object note(self, object container, object key, dict value, bint in_key):
        if not in_key and len(value) == 1 and reference_path(value) is not None:
            self.references.append((container, key, value))

    cdef bint takes(self, str word) except -1:
        cdef Py_ssize_t end = self.at + len(word)
        if end > self.size or self.text[self.at : end] != word:
            return False
        self.at = end
        return True

    cdef object string(self):
        cdef Py_ssize_t at = self.at + 1
        cdef bint plain = True
        cdef Py_UCS4 char
        while True:
            if at >= self.size:
                self.fail("a string has no end")
            char = self.text[at]
            if char == u'"':
                break
            if char == u"\\":
                plain = False
                at += 1  # whatever follows belongs to it
            elif char < 32 or 0xD800 <= char <= 0xDFFF:
                plain = False
            at += 1
        at += 1
        if plain:
            text = self.text[self.at + 1 : at - 1]
        else:
            try:
                text = msgspec.json.decode(self.text[self.at : at].encode(), type=str)
            except (msgspec.DecodeError, UnicodeError):
                self.fail("a string has a bad escape or a control character")
        self.at = at
        return text

    cdef Py_ssize_t digits(self, Py_ssize_t at) noexcept:
        """Where the digits from `at` on end."""
        while at < self.size and u"0" <= self.text[at] <= u"9":
            at += 1
        return at

    cdef Py_ssize_t integer_end(self) noexcept:
        """Where the integer here ends, its own place if there is none."""
        cdef Py_ssize_t first = self.at + (1 if self.here() == u"-" else 0)
        cdef Py_ssize_t end = self.digits(first)
        return end if end > first else self.at

    cdef Py_ssize_t number_end(self, Py_ssize_t end) noexcept:
        """The end of a number whose integer ends at `end`."""
        cdef Py_ssize_t first
        if end < self.size and self.text[end] == u".":
            first = end + 1
            if self.digits(first) > first:
                end = self.digits(first)
        if end < self.size and (self.text[end] == u"e" or self.text[end] == u"E"):
            first = end + 1
            if first < self.size and (self.text[first] == u"-" or self.text[first] == u"+"):
                first += 1
            if self.digits(first) > first:
                end = self.digits(first)
        return end

    cdef object integer_key(self):
        cdef Py_ssize_t end = self.integer_end()
        if end == self.at or self.number_end(end) != end:
            self.fail("expected a key: a string, an integer or an object")
        return self.integer(end)

    cdef object number(self):
        cdef Py_ssize_t whole = self.integer_end()
        cdef Py_ssize_t end
        if whole == self.at:
            self.fail("expected a value" if self.at < self.size else "the text ends early")
        end = self.number_end(whole)
        if end == whole:
            return self.integer(end)
        number = float(self.taken(end))
        if math.isinf(number):
            self.fail("a number is out of range")
        return number

    cdef object integer(self, Py_ssize_t end):
        cdef int64_t number = 0
        cdef Py_ssize_t at = self.at
        if end - at > SHORT_DIGITS:
            return int(self.taken(end))
        cdef bint negative = self.text[at] == u"-"
        for at in range(at + negative, end):
            number = number * 10 + <int64_t>self.text[at] - 48
        self.at = end
        return -number if negative else number

    cdef str taken(self, Py_ssize_t end):
        cdef str text = self.text[self.at : end]
        if end - self.at > DIGITS_MAX:
            self.fail(f"a number has more than {DIGITS_MAX} characters")
        self.at = end
        return text
