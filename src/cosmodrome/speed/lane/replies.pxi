# Part of native.pyx: frames with holes, and the answers of many sends (the twin: replies.py).

cdef Py_ssize_t _digits(uint8_t *to, int64_t value) noexcept nogil:
    """Write a number; how many bytes it took, at most 20."""
    cdef uint8_t digits[20]
    cdef int at = 20
    cdef bint negative = value < 0
    cdef uint64_t rest = <uint64_t>0 - <uint64_t>value if negative else <uint64_t>value
    while True:
        at -= 1
        digits[at] = <uint8_t>(48 + rest % 10)
        rest //= 10
        if rest == 0:
            break
    if negative:
        to[0] = 45
        to += 1
    memcpy(to, digits + at, 20 - at)
    return 20 - at + negative


cdef class Template:
    """A reply with holes, cut from a frame that the ordinary encoder made.

    `parts` lie around the holes. In a JSON header the last hole is the opaque. In a binary one
    the opaque is a number at its place, and each hole is preceded by its length.
    """

    def __init__(self, list parts not None, bint binary, Py_ssize_t fields_at, Py_ssize_t fields_bytes):
        for part in parts:
            if not isinstance(part, bytes):
                raise TypeError("parts of a template are bytes")
        self.parts = parts
        self.binary = binary
        self.fields_at = fields_at
        self.fields_bytes = fields_bytes
        self.fixed_bytes = sum(map(len, parts))
        self.holes = len(parts) - 1 - (not binary)
        if self.holes < 0:
            raise ValueError("a template without parts")

    cdef uint8_t *_part(self, uint8_t *to, Py_ssize_t number) noexcept:
        cdef bytes part = <bytes>self.parts[number]
        return _put(to, PyBytes_AS_STRING(part), PyBytes_GET_SIZE(part))

    cdef Py_ssize_t _end(self, uint8_t *start, uint8_t *to, int32_t opaque, Py_ssize_t body_bytes) noexcept:
        """Everything behind the last hole, and what the lengths are; the frame's size."""
        cdef Py_ssize_t header_bytes
        if self.binary:
            _put32(start + 8 + 5, <uint32_t>opaque)
            # All that is not in the parts was put into the holes.
            header_bytes = to - start - 8
            _put32(
                start + 8 + self.fields_at,
                <uint32_t>(self.fields_bytes + header_bytes - self.fixed_bytes),
            )
        else:
            to += _digits(to, opaque)
            to = self._part(to, len(self.parts) - 1)
            header_bytes = to - start - 8
        _put32(start, <uint32_t>(4 + header_bytes + body_bytes))
        _put32(start + 4, (<uint32_t>self.binary << 24) | <uint32_t>header_bytes)
        return to - start

    def head(self, int32_t opaque, Py_ssize_t body_bytes, *numbers):
        """Length words and header of a reply whose holes are these numbers."""
        cdef bytes out
        cdef uint8_t *start
        cdef uint8_t *to
        cdef Py_ssize_t number = 0
        cdef Py_ssize_t size
        cdef int64_t value
        if len(numbers) != self.holes:
            raise ValueError(f"{len(numbers)} numbers for {self.holes} holes")
        out = PyBytes_FromStringAndSize(NULL, 8 + self.fixed_bytes + 20 * (self.holes + 1))
        start = <uint8_t *>PyBytes_AS_STRING(out)
        to = self._part(start + 8, 0)
        for item in numbers:
            value = item
            size = _digits(to, value)
            if self.binary:
                _put32(to - 4, <uint32_t>size)
            to += size
            number += 1
            to = self._part(to, number)
        size = self._end(start, to, opaque, body_bytes)
        return out[:size]


cdef class Ticket:
    """Sends that were staged together and wait for the same promise."""

    cdef Ask *asks
    cdef int64_t *log_offsets
    cdef Py_ssize_t count
    cdef Py_ssize_t messages
    cdef list plans
    cdef list connections
    cdef public double began

    def __cinit__(self):
        self.asks = NULL
        self.log_offsets = NULL

    def __dealloc__(self):
        PyMem_Free(self.asks)
        PyMem_Free(self.log_offsets)

    def __len__(self):
        return self.count

    def requests(self):
        """Connection, code, opaque, serialize and one-way of each."""
        cdef Py_ssize_t number
        return [
            (
                self.connections[self.asks[number].connection], self.asks[number].code,
                self.asks[number].opaque, self.asks[number].serialize,
                bool(self.asks[number].oneway),
            )
            for number in range(self.count)
        ]

    def count_in(self, PutCounts counts not None):
        """Add what its requests brought."""
        cdef Py_ssize_t number
        cdef Plan plan
        for number in range(self.count):
            plan = <Plan>self.plans[self.asks[number].plan]
            plan.requests += 1
            plan.messages += self.asks[number].count
            plan.size += self.asks[number].size
        for plan in self.plans:
            if plan.requests:
                counts.count(plan.topic, plan.requests, plan.messages, plan.size)
                plan.requests = plan.messages = plan.size = 0

    def replies(self, Template json not None, Template binary not None, bytes host not None):
        """Connection, number of requests and all their answers; `host` is the front of ids."""
        cdef list out = []
        cdef Py_ssize_t first = 0
        cdef Py_ssize_t stop
        if json.binary or not binary.binary or json.holes != 3 or binary.holes != 3:
            raise ValueError("these are not the templates of a send")
        while first < self.count:
            stop = first + 1
            while stop < self.count and self.asks[stop].connection == self.asks[first].connection:
                stop += 1
            out.append((
                self.connections[self.asks[first].connection], stop - first,
                self._replies(first, stop, json, binary, host),
            ))
            first = stop
        return out

    cdef bytes _replies(
        self, Py_ssize_t first, Py_ssize_t stop, Template json, Template binary, bytes host
    ):
        cdef Py_ssize_t host_bytes = PyBytes_GET_SIZE(host)
        cdef Py_ssize_t id_bytes = host_bytes + 16
        cdef Py_ssize_t room, size, index, fixed_bytes
        cdef Py_ssize_t number
        cdef Ask *ask
        cdef Template template
        cdef bytes out
        cdef uint8_t *start
        cdef uint8_t *begin
        cdef uint8_t *to
        fixed_bytes = max(json.fixed_bytes, binary.fixed_bytes) + 8 + 3 * 20
        room = 0
        for number in range(first, stop):
            if not self.asks[number].oneway:
                room += fixed_bytes + self.asks[number].count * (id_bytes + 1)
        if room == 0:
            return b""
        out = PyBytes_FromStringAndSize(NULL, room)
        begin = start = <uint8_t *>PyBytes_AS_STRING(out)
        for number in range(first, stop):
            ask = &self.asks[number]
            if ask.oneway:
                continue
            template = binary if ask.serialize == SERIALIZE_BINARY else json
            to = template._part(start + 8, 0)
            size = ask.count * (id_bytes + 1) - 1
            if template.binary:
                _put32(to - 4, <uint32_t>size)
            for index in range(ask.count):
                if index:
                    to[0] = 44
                    to += 1
                to = _put(to, PyBytes_AS_STRING(host), host_bytes)
                to = _hex(to, <uint64_t>self.log_offsets[ask.first + index])
            to = template._part(to, 1)
            size = _digits(to, ask.queue_id)
            if template.binary:
                _put32(to - 4, <uint32_t>size)
            to = template._part(to + size, 2)
            size = _digits(to, ask.queue_offset)
            if template.binary:
                _put32(to - 4, <uint32_t>size)
            to = template._part(to + size, 3)
            start += template._end(start, to, ask.opaque, 0)
        return out[: start - begin]


def answer(
    list tickets not None, Template json, Template binary, bytes host not None, double now,
    PutCounts counts not None,
):
    """Give the replies of these tickets to their connections, and count what they brought.

    Returns how many requests took how many milliseconds, and the first error: a connection that
    fails does not keep the others from their replies.
    """
    cdef dict times = {}
    cdef Ticket ticket
    cdef Py_ssize_t took_ms
    cdef Py_ssize_t last_ms = -1
    cdef Py_ssize_t requests = 0
    error = None
    for ticket in tickets:
        ticket.count_in(counts)
        took_ms = <Py_ssize_t>((now - ticket.began) * 1000)
        if took_ms != last_ms:
            if requests:
                times[last_ms] = times.get(last_ms, 0) + requests
            last_ms = took_ms
            requests = 0
        requests += ticket.count
    if requests:
        times[last_ms] = times.get(last_ms, 0) + requests
    for ticket in tickets:
        for connection, count, replies in ticket.replies(json, binary, host):
            try:
                connection.answer_many(count, replies)
            except Exception as caught:
                error = error or caught
    return times, error


cdef uint8_t *_hex(uint8_t *to, uint64_t value) noexcept nogil:
    cdef const char *digits = "0123456789ABCDEF"
    cdef int shift = 60
    while shift >= 0:
        to[0] = digits[(value >> shift) & 15]
        to += 1
        shift -= 4
    return to
