# Part of native.pyx: what grows with every message (the twin: tails.py).

cdef enum:
    TAILS_AHEAD = 8
    SIGNED_MAX = 16  # names that are told by their signs


cdef inline uint64_t _sign(name) except? 0:
    """One bit of 64 that stands for a name."""
    return <uint64_t>1 << (<uint64_t>hash(name) & 63)


cdef uint64_t _signs(names) except? 0:
    """The bits of all names; all bits when they cannot be told."""
    cdef uint64_t signs = 0
    if type(names) is not set or len(names) > SIGNED_MAX:
        return ~<uint64_t>0
    for name in names:
        signs |= _sign(name)
    return signs


cdef class QueueEnd:
    """The offset that the next message of a queue gets."""

    def __cinit__(self, str topic not None, int32_t queue_id, int64_t following):
        self.key = (topic, queue_id)
        self.sign = _sign(topic)
        self.next = following


cdef class Tail:
    """The newest entries of a queue, which are in memory only."""

    def __cinit__(self, owner):
        self.owner = owner
        self.data = bytearray()

    @property
    def end(self):
        return self.at + PyByteArray_GET_SIZE(self.data)


# With thousands of queues none of what a run meets is in a cache, so it is asked for some runs ahead.
# Bare pointers: to count a reference to something means to wait for it.
cdef inline void _ask_for_tail(PyObject *queue_end) noexcept:
    if (<QueueEnd>queue_end).tail is not None:
        ask_for(<const uint8_t *><PyObject *>(<QueueEnd>queue_end).tail.data)


cdef inline void _ask_for_end(PyObject *queue_end) noexcept:
    cdef PyObject *data
    if (<QueueEnd>queue_end).tail is not None:
        data = <PyObject *>(<QueueEnd>queue_end).tail.data
        ask_for(<const uint8_t *>byte_array_end(data))


cdef class Runs:
    """Entries of consecutive offsets by queue, all in one buffer; one by one they are tuples.

    Whoever makes them adds queue ends, counts what they get, has the buffer allotted, and puts
    the entries of each run into it, one after the other.
    """

    def __cinit__(self):
        self.runs = NULL
        self.count = self.room = 0
        self.entries = b""

    def __dealloc__(self):
        cdef Py_ssize_t number
        for number in range(self.count):
            Py_DECREF(<object>self.runs[number].queue_end)
        PyMem_Free(self.runs)

    cdef Py_ssize_t add(self, QueueEnd queue_end) except -1:
        """A run that begins at the end of a queue; its number."""
        cdef OneRun *runs
        cdef Py_ssize_t room
        if self.count == self.room:
            room = 16 if self.room == 0 else 4 * self.room
            runs = <OneRun *>PyMem_Realloc(self.runs, room * sizeof(OneRun))
            if runs == NULL:
                raise MemoryError
            self.runs = runs
            self.room = room
        Py_INCREF(queue_end)
        ask_for(<const uint8_t *><PyObject *>queue_end.tail)  # it comes with `spread`
        self.runs[self.count] = OneRun(<PyObject *>queue_end, queue_end.next, 0, NULL)
        self.count += 1
        return self.count - 1

    cdef int allot(self) except -1:
        """The buffer for as many entries as were counted, and where those of each run go."""
        cdef Py_ssize_t number
        cdef Py_ssize_t size = 0
        cdef uint8_t *to
        for number in range(self.count):
            size += self.runs[number].count * QUEUE_ENTRY_BYTES
            _ask_for_tail(self.runs[number].queue_end)  # so that `spread` finds it
        self.entries = PyBytes_FromStringAndSize(NULL, size)
        to = <uint8_t *>PyBytes_AS_STRING(self.entries)
        for number in range(self.count):
            self.runs[number].to = to
            to += self.runs[number].count * QUEUE_ENTRY_BYTES
        return 0

    cdef const uint8_t *begin(self) noexcept:
        return <const uint8_t *>PyBytes_AS_STRING(self.entries)

    def __len__(self):
        return self.count

    def __iter__(self):
        cdef list out = []
        cdef const uint8_t *data = self.begin()
        cdef QueueEnd queue_end
        cdef Py_ssize_t number, size
        for number in range(self.count):
            queue_end = <QueueEnd>self.runs[number].queue_end
            size = self.runs[number].count * QUEUE_ENTRY_BYTES
            out.append((*queue_end.key, self.runs[number].first, data[:size]))
            data += size
        return iter(out)

    def put_back(self):
        """Take back the moves of the queue ends; a queue that is gone stays so."""
        cdef Py_ssize_t number
        cdef QueueEnd queue_end
        for number in range(self.count):
            queue_end = <QueueEnd>self.runs[number].queue_end
            if queue_end.next >= 0:
                queue_end.next = self.runs[number].first


cdef inline bint _add_entries(
    Tail tail, int64_t queue_offset, const uint8_t *entries, Py_ssize_t size, set dirty
) except -1:
    """Add entries to a tail; False when they need a closer look."""
    cdef Py_ssize_t before = PyByteArray_GET_SIZE(tail.data)
    cdef const uint8_t *last = entries + size - QUEUE_ENTRY_BYTES
    if tail.at + before != queue_offset * QUEUE_ENTRY_BYTES:
        return False
    if _i64(entries) + _i32(entries + 8) <= tail.log_end:
        return False
    memcpy(_grow_much(tail.data, size), entries, size)
    tail.log_end = _i64(last) + _i32(last + 8)
    if not tail.dirty:
        tail.dirty = True
        dirty.add(tail.owner)
    return True


cdef inline bint _waited_for(tuple key, topics, list watched) except -1:
    if key[0] in topics:
        return True
    for some in watched:
        if key in some:
            return True
    return False


def spread(runs not None, dict queues not None, set dirty not None, topics, list watched not None):
    cdef list waiting = [some for some in watched if some]
    if isinstance(runs, Runs):
        return _spread_known(<Runs>runs, queues, dirty, topics, waiting)
    cdef Py_ssize_t done = 0
    cdef Py_ssize_t size = 0
    cdef Py_ssize_t more
    cdef list seen = []
    cdef tuple run
    cdef tuple key
    cdef bytes entries
    for run in runs:
        key = (run[0], run[1])
        queue = queues.get(key)
        if queue is None:
            break
        entries = <bytes?>run[3]
        more = PyBytes_GET_SIZE(entries)
        if more < QUEUE_ENTRY_BYTES:
            raise ValueError(f"a run of {more} bytes")
        if not _add_entries(
            <Tail?>queue.growth, run[2], <const uint8_t *>PyBytes_AS_STRING(entries), more, dirty
        ):
            break
        if _waited_for(key, topics, waiting):
            seen.append((queue, entries))
        size += more
        done += 1
    return done, size, seen


cdef _spread_known(Runs runs, dict queues, set dirty, topics, list waiting):
    """The same for runs whose queue ends know the tails of their queues."""
    cdef Py_ssize_t size = 0
    cdef Py_ssize_t number, more
    cdef const uint8_t *data = runs.begin()
    cdef uint64_t signs = _signs(topics)
    cdef list seen = []
    cdef QueueEnd queue_end
    cdef Tail tail
    for number in range(min(runs.count, TAILS_AHEAD)):
        _ask_for_end(runs.runs[number].queue_end)
    for number in range(runs.count):
        if number + TAILS_AHEAD < runs.count:
            _ask_for_end(runs.runs[number + TAILS_AHEAD].queue_end)
        queue_end = <QueueEnd>runs.runs[number].queue_end
        more = runs.runs[number].count * QUEUE_ENTRY_BYTES
        tail = queue_end.tail
        if tail is None or tail.owner is None:
            queue = queues.get(queue_end.key)
            if queue is None:
                return number, size, seen
            tail = queue_end.tail = <Tail?>queue.growth
        if not _add_entries(tail, runs.runs[number].first, data, more, dirty):
            return number, size, seen
        if (waiting or queue_end.sign & signs) and _waited_for(queue_end.key, topics, waiting):
            seen.append((tail.owner, data[:more]))
        data += more
        size += more
    return runs.count, size, seen
