# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True
# cython: initializedcheck=False
"""Messages that waited, put under their real topics, compiled. `pure` is the law.

Queues are remembered by the bytes of their names, a few by comparing and the rest in a dict,
so that no Python object is made per message. Nothing is read beyond a length that was checked before.
"""

from cpython.bytearray cimport PyByteArray_AS_STRING, PyByteArray_GET_SIZE, PyByteArray_Resize
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from cpython.mem cimport PyMem_Free, PyMem_Realloc
from libc.stdint cimport int32_t, int64_t, uint8_t, uint32_t, uint64_t
from libc.string cimport memchr, memcmp, memcpy

from cosmodrome.speed.core.native cimport (
    QueueEnd,
    _i16,
    _i32,
    _is_utf8,
    _put,
    _put32,
    _put64,
    has_high,
)

import functools

from cosmodrome import layout
from cosmodrome.speed.due import pure
from cosmodrome.speed.core.tails import put_back

cdef enum:
    HEAD_BYTES = 48
    MIDDLE_BYTES = 16
    HOST_V4 = 8
    HOST_V6 = 20
    QUEUE_AT = 12
    QUEUE_OFFSET_AT = 20
    LOG_OFFSET_AT = 28
    SYS_FLAG_AT = 36
    NEAR = 16  # queues that are found by comparing
    QUEUE_DIGITS = 9

assert HEAD_BYTES == layout.RECORD_HEAD.size and MIDDLE_BYTES == layout.RECORD_MIDDLE.size
assert (HOST_V4, HOST_V6) == (layout.HOST_V4_BYTES, layout.HOST_V6_BYTES)
assert (QUEUE_OFFSET_AT, SYS_FLAG_AT) == (layout.RECORD_QUEUE_OFFSET_AT, layout.RECORD_SYS_FLAG_AT)
assert QUEUE_DIGITS == pure.QUEUE_DIGITS_MAX

cdef int32_t MAGIC_RECORD = layout.MAGIC_RECORD
cdef Py_ssize_t RECORD_BYTES_MIN = layout.RECORD_BYTES_MIN
cdef Py_ssize_t TOPIC_BYTES_MAX = layout.TOPIC_BYTES_MAX
cdef int32_t BORN_V6 = layout.SYS_BORN_V6
cdef int32_t STORE_V6 = layout.SYS_STORE_V6
cdef int32_t TRANSACTION = layout.SYS_TRANSACTION_MASK
cdef int32_t PREPARED = layout.SYS_PREPARED
cdef int32_t ROLLBACK = layout.SYS_ROLLBACK
cdef bytes HALF_TOPIC = pure.HALF_TOPIC

cdef struct Waiting:
    const uint8_t *start
    const uint8_t *topic  # where it goes to, within its properties
    Py_ssize_t topic_bytes
    Py_ssize_t store_ms_at  # these count from the start
    Py_ssize_t middle_at
    Py_ssize_t body_end
    Py_ssize_t properties_at  # of their length
    Py_ssize_t end
    Py_ssize_t size  # of what is delivered
    int32_t queue_id

cdef struct Target:  # a queue that messages go to
    const uint8_t *topic
    Py_ssize_t topic_bytes
    int32_t queue_id
    int64_t count
    int64_t size


cdef class DueMessages:
    """See `pure.DueMessages`."""

    cdef readonly Py_ssize_t taken
    cdef readonly Py_ssize_t staged
    cdef readonly int64_t end
    cdef bytes data
    cdef Waiting *waiting
    cdef Py_ssize_t waiting_room
    cdef Target *targets
    cdef Py_ssize_t target_count, target_room
    cdef list names  # of the targets
    cdef dict far  # topic and queue -> number of the target, when there are many
    cdef bint busy

    def __cinit__(self):
        self.waiting = NULL
        self.targets = NULL
        self.taken = self.waiting_room = self.target_count = self.target_room = 0

    def __dealloc__(self):
        PyMem_Free(self.waiting)
        PyMem_Free(self.targets)

    def __init__(self, bytes data not None, Py_ssize_t record_bytes_max, Py_ssize_t body_bytes_max):
        cdef const uint8_t *start = <const uint8_t *>PyBytes_AS_STRING(data)
        cdef Py_ssize_t size = PyBytes_GET_SIZE(data)
        cdef Py_ssize_t at = 0
        cdef Waiting *one
        self.data = data
        self.names = []
        self.far = {}
        self.taken = self.staged = self.target_count = 0
        self.end = 0
        while at < size:
            one = self._new_waiting()
            if not _look(start + at, size - at, body_bytes_max, one) or one.size > record_bytes_max:
                break
            self.taken += 1
            at += one.end

    @property
    def left(self):
        return self.taken - self.staged

    @property
    def next_bytes(self):
        return self.waiting[self.staged].size if self.staged < self.taken else 0

    def counts(self):
        cdef Py_ssize_t number
        return [
            (self.names[number], self.targets[number].queue_id, self.targets[number].count,
             self.targets[number].size)
            for number in range(self.target_count)
            if self.targets[number].count
        ]

    def encode(
        self, bytearray out not None, int64_t log_offset, int64_t room, int64_t store_ms, queue_end,
        list undo not None,
    ):
        cdef Py_ssize_t mark = PyByteArray_GET_SIZE(out)
        cdef Py_ssize_t first = self.staged
        cdef Py_ssize_t stop = first
        cdef Py_ssize_t number, target
        cdef Py_ssize_t size = 0
        cdef list queue_ends = []  # by target, None as long as this call did not meet it
        cdef list moved = []
        cdef QueueEnd to
        cdef uint8_t *at
        if self.busy:
            raise RuntimeError("these messages are being staged")
        while stop < self.taken and size + self.waiting[stop].size <= room:
            size += self.waiting[stop].size
            stop += 1
        self.busy = True
        PyByteArray_Resize(out, mark + size)
        try:
            size = 0
            for number in range(first, stop):
                target = self._target(&self.waiting[number])
                while len(queue_ends) <= target:
                    queue_ends.append(None)
                to = queue_ends[target]
                if to is None:
                    to = queue_end(self.names[target], self.targets[target].queue_id)
                    queue_ends[target] = to
                    moved.append((to, to.next))
                # Only now: whoever gives queue ends may run any code.
                at = <uint8_t *>PyByteArray_AS_STRING(out) + mark + size
                _copy(at, &self.waiting[number], log_offset + size, to.next, store_ms)
                to.next += 1
                size += self.waiting[number].size
        except BaseException:
            PyByteArray_Resize(out, mark)
            put_back(moved)
            raise
        finally:
            self.busy = False
        undo.append(functools.partial(put_back, moved))
        for number in range(first, stop):
            target = self._target(&self.waiting[number])
            self.targets[target].count += 1
            self.targets[target].size += self.waiting[number].size
        self.staged = stop
        self.end = log_offset + size
        return size, stop - first, None, b""

    cdef Waiting *_new_waiting(self) except NULL:
        cdef Py_ssize_t room
        cdef Waiting *waiting
        if self.taken == self.waiting_room:
            room = 64 if self.waiting_room == 0 else 2 * self.waiting_room
            waiting = <Waiting *>PyMem_Realloc(self.waiting, room * sizeof(Waiting))
            if waiting == NULL:
                raise MemoryError
            self.waiting = waiting
            self.waiting_room = room
        return &self.waiting[self.taken]

    cdef Py_ssize_t _target(self, Waiting *one) except -1:
        """The number of the queue that a message goes to."""
        cdef Py_ssize_t number
        cdef Target *known
        cdef tuple key
        for number in range(min(self.target_count, <Py_ssize_t>NEAR)):
            known = &self.targets[number]
            if (
                known.queue_id == one.queue_id and known.topic_bytes == one.topic_bytes
                and memcmp(known.topic, one.topic, one.topic_bytes) == 0
            ):
                return number
        name = PyBytes_FromStringAndSize(<const char *>one.topic, one.topic_bytes)
        key = (name, one.queue_id)
        found = self.far.get(key)
        if found is not None:
            return found
        self._more_targets()
        self.targets[self.target_count] = Target(
            one.topic, one.topic_bytes, one.queue_id, 0, 0
        )
        self.names.append(name.decode())
        self.far[key] = self.target_count
        self.target_count += 1
        return self.target_count - 1

    cdef int _more_targets(self) except -1:
        cdef Py_ssize_t room
        cdef Target *targets
        if self.target_count == self.target_room:
            room = NEAR if self.target_room == 0 else 4 * self.target_room
            targets = <Target *>PyMem_Realloc(self.targets, room * sizeof(Target))
            if targets == NULL:
                raise MemoryError
            self.targets = targets
            self.target_room = room
        return 0


cdef void _copy(
    uint8_t *to, Waiting *one, int64_t log_offset, int64_t queue_offset, int64_t store_ms
) noexcept nogil:
    cdef uint8_t *at
    memcpy(to, one.start, one.body_end)
    _put32(to, <uint32_t>one.size)
    _put32(to + QUEUE_AT, <uint32_t>one.queue_id)
    _put64(to + QUEUE_OFFSET_AT, <uint64_t>queue_offset)
    _put64(to + LOG_OFFSET_AT, <uint64_t>log_offset)
    _put64(to + one.store_ms_at, <uint64_t>store_ms)
    _put64(to + one.middle_at + 4, 0)
    at = to + one.body_end
    at[0] = <uint8_t>one.topic_bytes
    at = _put(at + 1, one.topic, one.topic_bytes)
    _put(at, one.start + one.properties_at, one.end - one.properties_at)


cdef bint _look(const uint8_t *start, Py_ssize_t left, Py_ssize_t body_bytes_max, Waiting *one) except -1:
    """The parts of the record that begins there; False unless it is plain."""
    cdef int32_t sys_flag
    cdef Py_ssize_t body_at, body_bytes
    if left < RECORD_BYTES_MIN:
        return False
    one.start = start
    one.end = _i32(start)
    if _i32(start + 4) != MAGIC_RECORD or not RECORD_BYTES_MIN <= one.end <= left:
        return False
    sys_flag = _i32(start + SYS_FLAG_AT)
    if sys_flag & TRANSACTION == PREPARED or sys_flag & TRANSACTION == ROLLBACK:
        return False
    one.store_ms_at = HEAD_BYTES + (HOST_V6 if sys_flag & BORN_V6 else HOST_V4)
    one.middle_at = one.store_ms_at + 8 + (HOST_V6 if sys_flag & STORE_V6 else HOST_V4)
    body_at = one.middle_at + MIDDLE_BYTES
    if body_at + 3 > one.end:
        return False
    body_bytes = _i32(start + body_at - 4)
    if not 0 <= body_bytes <= one.end - body_at - 3 or body_bytes > body_bytes_max:
        return False
    one.body_end = body_at + body_bytes
    one.properties_at = one.body_end + 1 + start[one.body_end]
    if start[one.body_end] > TOPIC_BYTES_MAX or one.properties_at + 2 > one.end:
        return False
    if _i16(start + one.properties_at) != one.end - one.properties_at - 2:
        return False
    if not _read_target(start + one.properties_at + 2, start + one.end, one):
        return False
    one.size = one.body_end + 1 + one.topic_bytes + one.end - one.properties_at
    return True


cdef bint _read_target(const uint8_t *at, const uint8_t *end, Waiting *one) except -1:
    cdef const uint8_t *stop
    cdef const uint8_t *value
    cdef const uint8_t *digit
    cdef bint with_queue = False
    one.topic = NULL
    if at < end and memchr(at, 0, end - at) != NULL:
        return False
    if has_high(at, end - at) and not _is_utf8(at, end - at):
        return False
    while at < end:
        stop = <const uint8_t *>memchr(at, 2, end - at)
        if stop == NULL:
            stop = end
        if stop - at > 9 and memcmp(at, <const char *>"REAL_", 5) == 0:
            if stop - at > 11 and memcmp(at, <const char *>"REAL_TOPIC\x01", 11) == 0:
                if one.topic != NULL:
                    return False
                one.topic = at + 11
                one.topic_bytes = stop - one.topic
            elif memcmp(at, <const char *>"REAL_QID\x01", 9) == 0:
                value = at + 9
                if with_queue or stop - value > QUEUE_DIGITS:
                    return False
                with_queue = True
                one.queue_id = 0
                digit = value
                while digit < stop:
                    if not 48 <= digit[0] <= 57:
                        return False
                    one.queue_id = 10 * one.queue_id + (digit[0] - 48)
                    digit += 1
        at = stop + 1
    if one.topic == NULL or not with_queue or one.topic_bytes > TOPIC_BYTES_MAX:
        return False
    return not (
        one.topic_bytes == PyBytes_GET_SIZE(HALF_TOPIC)
        and memcmp(one.topic, PyBytes_AS_STRING(HALF_TOPIC), one.topic_bytes) == 0
    )
