# Part of native.pyx: what was sent and pulled, for the statistics (the twin: counts.py).

cdef class PutSum:
    """See `PutCounts`."""


cdef class PutCounts:
    """Messages that were stored, by topic, until somebody takes the sums."""

    def __init__(self):
        self.sums = {}

    cdef int count(self, str topic, int64_t requests, int64_t messages, int64_t size) except -1:
        cdef PyObject *known = PyDict_GetItem(self.sums, topic)
        cdef PutSum total
        if known != NULL:
            total = <PutSum>known
        else:
            total = PutSum()
            self.sums[topic] = total
        total.requests += requests
        total.messages += messages
        total.size += size
        return 0

    def add(self, str topic not None, int64_t requests, int64_t messages, int64_t size):
        """So many requests brought messages of `size` bytes together."""
        self.count(topic, requests, messages, size)

    def take(self):
        """Topic, requests, messages and bytes of all that was counted since the last time."""
        cdef dict sums = self.sums
        self.sums = {}
        return [
            (topic, (<PutSum>total).requests, (<PutSum>total).messages, (<PutSum>total).size)
            for topic, total in sums.items()
        ]


cdef class GetSum:
    """See `GetCounts`."""


cdef class GetCounts:
    """Messages that were pulled, by group, topic and queue, until somebody takes the sums."""

    def __init__(self):
        self.sums = {}

    cdef int count(
        self, tuple key, int64_t pulls, int64_t messages, int64_t size, double ms,
        int64_t next_offset,
    ) except -1:
        cdef PyObject *known = PyDict_GetItem(self.sums, key)
        cdef GetSum total
        if known != NULL:
            total = <GetSum>known
        else:
            total = GetSum()
            self.sums[key] = total
        total.pulls += pulls
        total.messages += messages
        total.size += size
        total.ms += ms * pulls
        total.longest_ms = max(total.longest_ms, ms)
        total.next_offset = next_offset
        self.pulls_total += pulls
        self.messages_total += messages
        self.bytes_total += size
        return 0

    def add(
        self, tuple key not None, int64_t pulls, int64_t messages, int64_t size, double ms,
        int64_t next_offset,
    ):
        """Pulls of a group (`key`: group, topic, queue id) brought messages and took `ms` each."""
        self.count(key, pulls, messages, size, ms, next_offset)

    def take(self):
        """Key, pulls, messages, bytes, ms, ms of the longest and next offset, since the last time."""
        cdef dict sums = self.sums
        cdef GetSum total
        cdef list out = []
        self.sums = {}
        for key, one in sums.items():
            total = <GetSum>one
            out.append((
                key, total.pulls, total.messages, total.size, total.ms, total.longest_ms,
                total.next_offset,
            ))
        return out
