# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True
# cython: initializedcheck=False
"""The inner loops of the fast lane: whole read buffers in, records and replies out.

Theory of operation. `Intake.gather` reads the frames of a buffer from a position on. As long as
they are sends that a `Plan` (what is known about a topic) allows without a second thought it keeps
a copy of them and notes them, without making a Python object per message. So the sends of many
connections come together until whoever gathers has them staged in the log, which calls back
`encode` once per log file. `tickets` cuts them into `Ticket`s: those of one file that wait
for the same promise. When that promise is kept, `Ticket.replies` writes the answers into one
buffer per connection, from `Template`s that were made by the ordinary encoder. A header that is
like one before, but for a few values, is compared with that instead of being read.

Its twin in plain Python is `lane_pure`. This module has no opinion: whatever is unusual in the least (an escape in a
name, a property that means something, a field that is not there) ends the walk, and the frame goes
to the slow lane untouched. So it can only be as strict as the slow lane or stricter. Nothing is
read beyond a length that was checked before.
"""

from cpython.buffer cimport PyBUF_SIMPLE, PyBuffer_Release, PyObject_GetBuffer
from cpython.bytearray cimport PyByteArray_AS_STRING, PyByteArray_GET_SIZE, PyByteArray_Resize
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from cpython.dict cimport PyDict_GetItem
from cpython.mem cimport PyMem_Calloc, PyMem_Free, PyMem_Malloc, PyMem_Realloc
from cpython.object cimport PyObject
from cpython.ref cimport Py_INCREF, Py_XDECREF
from cpython.unicode cimport PyUnicode_DecodeUTF8
from libc.stdint cimport int32_t, int64_t, uint8_t, uint32_t, uint64_t
from libc.string cimport memcmp, memcpy, memset

from cosmodrome import layout
from cosmodrome.speed.core.native cimport (
    Facts,
    OneRun,
    QueueEnd,
    Runs,
    _checksum,
    _i16,
    _i32,
    _i64,
    _int_end,
    _is_utf8,
    _keys_max,
    _past_blanks,
    _prefix,
    _put,
    _put16,
    _put32,
    _put64,
    _put_keys,
    _span_end,
    _tags_code,
    _unescape,
    ask_for,
    has_high,
    span_stop,
)

cdef int SERIALIZE_JSON = layout.SERIALIZE_JSON
cdef int SERIALIZE_BINARY = layout.SERIALIZE_BINARY
cdef int32_t FLAG_RESPONSE = layout.FLAG_RESPONSE
cdef int32_t FLAG_ONEWAY = layout.FLAG_ONEWAY
cdef int64_t FRAME_BYTES_MAX = layout.FRAME_BYTES_MAX
cdef int32_t HEADER_BYTES_MAX = layout.HEADER_BYTES_MAX
cdef Py_ssize_t BINARY_HEADER_BYTES = layout.BINARY_HEADER.size
cdef int32_t MAGIC_RECORD = layout.MAGIC_RECORD
cdef int32_t SYS_TRANSACTION_MASK = layout.SYS_TRANSACTION_MASK
cdef int32_t SYS_BORN_V6 = layout.SYS_BORN_V6
cdef int32_t SYS_STORE_V6 = layout.SYS_STORE_V6
cdef uint32_t CRC_MASK = layout.CRC_MASK
cdef Py_ssize_t HOST_V4_BYTES = layout.HOST_V4_BYTES
cdef Py_ssize_t HOST_V6_BYTES = layout.HOST_V6_BYTES
cdef Py_ssize_t RECORD_BYTES_MIN = layout.RECORD_BYTES_MIN
cdef Py_ssize_t PROPERTIES_BYTES_MAX = layout.PROPERTIES_BYTES_MAX
cdef Py_ssize_t ITEM_HEAD_BYTES = layout.BATCH_ITEM_HEAD.size
cdef Py_ssize_t QUEUE_ENTRY_BYTES = layout.QUEUE_ENTRY_BYTES
cdef Py_ssize_t INDEX_KEY_BYTES = layout.INDEX_KEY.size

cdef enum:
    NAME_BYTES_MAX = 127  # of a topic: its length is one byte, and signed
    PAIRS_MAX = 24
    ENDS_AHEAD = 4
    FRAMES_AHEAD = 4  # a power of two
    PLANS_MANY = 64  # fewer are in a cache anyway
    ITEMS_KEPT = 8192
    SCRATCH_BYTES_KEPT = 1048576
    KEPT_BYTES_KEPT = 2097152

cdef enum:  # why a walk ended, as in `layout`
    LANE_NOTHING = 0
    LANE_PULL = 1
    LANE_COMMIT = 2
    LANE_OTHER = 3
    LANE_FULL = 4

cdef uint64_t _encodings = 0  # of all intakes, so that none takes the marks of another for its own

include "counts.pxi"
include "heads.pxi"
include "repeated_headers.pxi"
include "messages.pxi"
include "replies.pxi"


cdef class Intake:
    """Reads sends out of buffers and writes them as records; see the module's theory."""

    cdef Ask *asks
    cdef Py_ssize_t ask_count, ask_room
    cdef Item *items
    cdef Py_ssize_t item_count, item_room
    cdef uint8_t *scratch
    cdef Py_ssize_t scratch_size, scratch_room
    cdef uint8_t *keys  # for the index, packed
    cdef Py_ssize_t keys_room
    cdef Shape *shapes
    cdef Py_ssize_t shape_count, shape_next, shape_last  # the one to replace, and the last one met
    cdef Py_ssize_t credit, unknown
    cdef list plans
    cdef object find
    cdef bytes cluster
    cdef int64_t body_bytes_max, record_bytes_max
    cdef uint8_t *kept  # the frames of all sends that are noted
    cdef Py_ssize_t kept_room
    cdef list connections  # by buffer
    cdef list born_hosts  # of them
    cdef Py_ssize_t encoded  # requests that are staged
    cdef uint64_t gathering  # the number of this one
    cdef list portions  # (first request, request behind the last) per log file
    cdef bint busy
    cdef bytes born_host
    cdef bytes store_host
    cdef Ahead ahead[FRAMES_AHEAD]  # by number of the frame
    cdef Ahead *guess  # of the frame that is being read
    cdef readonly Plans known
    cdef readonly uint64_t shaped  # headers that had a known shape
    cdef readonly bint saw_binary  # in the last buffer
    cdef readonly Py_ssize_t kept_bytes

    def __cinit__(self):
        self.asks = NULL
        self.items = NULL
        self.scratch = NULL
        self.keys = NULL
        self.keys_room = 0
        self.kept = NULL
        self.kept_room = self.kept_bytes = 0
        self.shapes = NULL
        self.shape_count = self.shape_next = self.shape_last = self.unknown = 0
        self.credit = CREDIT_MAX
        self.ask_count = self.ask_room = self.item_count = self.item_room = 0
        self.scratch_size = self.scratch_room = 0
        memset(self.ahead, 0, sizeof(self.ahead))
        self.guess = &self.ahead[0]

    def __init__(self, find, str cluster not None, int64_t body_bytes_max, int64_t record_bytes_max):
        """`find` gives the plan of a topic, or None for one that needs the slow lane."""
        self.find = find
        self.cluster = f"CLUSTER\x01{cluster}".encode()
        self.body_bytes_max = body_bytes_max
        self.record_bytes_max = record_bytes_max
        self.known = Plans()
        self.plans = []
        self.portions = []
        self.connections = []
        self.born_hosts = []
        self.gathering = 1  # plans have met none

    def __dealloc__(self):
        PyMem_Free(self.kept)
        PyMem_Free(self.asks)
        PyMem_Free(self.items)
        PyMem_Free(self.scratch)
        PyMem_Free(self.keys)
        PyMem_Free(self.shapes)

    # --- the walk ----------------------------------------------------------------------------

    def gather(
        self, connection, view, Py_ssize_t at, Py_ssize_t limit, bytes born_host not None,
        bytes store_host not None,
    ):
        """Note the sends from `at` on, at most `limit`, behind those that are noted already.

        Returns where the first frame begins that was not taken, what it is, for instance LANE_OTHER
        for the slow lane, and how many sends were taken. With an empty `store_host` none is.
        """
        cdef Py_buffer buffer
        cdef Py_ssize_t start = self.kept_bytes
        cdef Py_ssize_t position = start
        cdef Py_ssize_t asks_before = self.ask_count
        cdef Py_ssize_t items_before = self.item_count
        cdef Py_ssize_t scratch_before = self.scratch_size
        cdef Py_ssize_t why
        if self.busy or self.encoded:
            raise RuntimeError("the intake is in use")
        if asks_before and store_host != self.store_host:
            raise ValueError("sends that are gathered together have one store host")
        self.busy = True
        PyObject_GetBuffer(view, &buffer, PyBUF_SIMPLE)
        try:
            self.saw_binary = False
            # The beginning of a long frame comes again with every further piece of it.
            if _frame(<const uint8_t *>buffer.buf + at, buffer.len - at) == 0:
                return at, LANE_NOTHING, 0
            self.born_host = born_host
            self.store_host = store_host
            self._keep(<const uint8_t *>buffer.buf + at, buffer.len - at)
            why = self._walk(self.kept, &position, start + buffer.len - at, asks_before + limit)
            if self.ask_count > asks_before:
                self.connections.append(connection)
                self.born_hosts.append(born_host)
                self.kept_bytes = position
            return at + position - start, why, self.ask_count - asks_before
        except BaseException:
            self.ask_count = asks_before
            self.item_count = items_before
            self.scratch_size = scratch_before
            raise
        finally:
            PyBuffer_Release(&buffer)
            self.busy = False

    def clear(self):
        """Forget what was gathered; the next gathering begins."""
        if (
            self.item_room > ITEMS_KEPT or self.scratch_room > SCRATCH_BYTES_KEPT
            or self.kept_room > KEPT_BYTES_KEPT
        ):
            self._let_go()
        self.ask_count = self.item_count = self.scratch_size = self.encoded = 0
        self.kept_bytes = 0
        self.gathering += 1
        self.plans.clear()
        self.portions.clear()
        self.connections.clear()
        self.born_hosts.clear()

    def left_over(self):
        """Connection, number of requests and their frames, of what was not encoded."""
        cdef list out = []
        cdef Py_ssize_t first = self.encoded
        cdef Py_ssize_t stop, start, end
        while first < self.ask_count:
            stop = first + 1
            while stop < self.ask_count and self.asks[stop].connection == self.asks[first].connection:
                stop += 1
            start = self.asks[first].start
            end = self.asks[stop].start if stop < self.ask_count else self.kept_bytes
            out.append((
                self.connections[self.asks[first].connection], stop - first,
                PyBytes_FromStringAndSize(<char *>self.kept + start, end - start),
            ))
            first = stop
        return out

    cdef int _walk(self, const uint8_t *data, Py_ssize_t *position, Py_ssize_t end, Py_ssize_t limit) except -1:
        cdef Head head
        cdef const uint8_t *body = NULL
        cdef Py_ssize_t body_bytes = 0
        cdef Py_ssize_t at = position[0]
        cdef Py_ssize_t looked_at = at  # frames before this were looked at ahead
        cdef Py_ssize_t number = 0
        cdef Py_ssize_t looked = 0
        cdef Py_ssize_t length
        cdef bint many = self.known.count >= PLANS_MANY and self.shape_count > 0
        cdef int why = LANE_NOTHING
        memset(self.ahead, 0, sizeof(self.ahead))  # what was guessed is of other frames
        while True:
            if many:
                while looked < number + FRAMES_AHEAD:
                    length = _frame(data + looked_at, end - looked_at)
                    if length <= 0:
                        break
                    self._look_ahead(data + looked_at + 4, length, looked)
                    looked_at += 4 + length
                    looked += 1
                self.guess = &self.ahead[number & (FRAMES_AHEAD - 1)]
                number += 1
            length = _frame(data + at, end - at)
            if length <= 0:
                why = LANE_NOTHING if length == 0 else LANE_OTHER
                break
            if self.ask_count >= limit:
                why = LANE_FULL
                break
            if self._take_known(data + at + 4, length, at):
                at += 4 + length
                continue
            if not _read_head(data + at + 4, length, &head, &body, &body_bytes):
                why = LANE_OTHER
                break
            if head.code == CODE_PULL:
                why = LANE_PULL
                break
            if head.code == CODE_COMMIT:
                why = LANE_COMMIT
                break
            if not self._take_send(&head, body, body_bytes, at):
                why = LANE_OTHER
                break
            if head.serialize == SERIALIZE_BINARY:
                self.saw_binary = True
            at += 4 + length
        position[0] = at
        return why

    cdef void _look_ahead(self, const uint8_t *at, Py_ssize_t length, Py_ssize_t number) noexcept:
        """Have the plan of a frame on its way to the cache, should it be like the last one.

        A guess may be wrong: then it names another place than that of the topic, and is not used.
        """
        cdef Shape *shape = &self.shapes[self.shape_last]
        cdef Ahead *ahead = &self.ahead[number & (FRAMES_AHEAD - 1)]
        cdef Ahead *nearer = &self.ahead[(number - FRAMES_AHEAD // 2) & (FRAMES_AHEAD - 1)]
        cdef Py_ssize_t header_bytes = _i32(at) & 0xFFFFFF
        ahead.at = NULL
        if (
            shape.topic_at < 0 or header_bytes > length - 4
            or header_bytes - shape.topic_at < NAME_BYTES_MAX + 1
        ):
            return
        at += 4 + shape.topic_at
        ahead.size = shape.topic_bytes
        if ahead.size == 0:
            ahead.size = span_stop(at, at + NAME_BYTES_MAX + 1) - at
        ahead.at = at
        ahead.hash = name_hash(at, ahead.size, self.known.seed)
        self.known.ask_for_slot(ahead.hash)
        if nearer.at != NULL:
            self.known.ask_for_plan(nearer.hash)

    cdef bint _take_send(self, Head *head, const uint8_t *body, Py_ssize_t body_bytes, Py_ssize_t start) except -1:
        """Note a send; False, with nothing changed, when the slow lane has to look at it."""
        cdef Ask ask
        cdef Py_ssize_t items_before = self.item_count
        cdef Py_ssize_t scratch_before = self.scratch_size
        cdef int32_t ignored = 0, flag = 0
        cdef bint batch = head.code == CODE_SEND_BATCH
        cdef bint unit = False
        cdef Noted noted
        cdef Plan plan
        if PyBytes_GET_SIZE(self.store_host) == 0 or body_bytes > self.body_bytes_max:
            return False
        if head.fields[0].at == NULL or head.fields[2].at == NULL:
            return False
        if not (
            _number32(&head.fields[3], &ignored) and _number32(&head.fields[4], &ask.queue_id)
            and _number32(&head.fields[5], &ask.sys_flag) and _number(&head.fields[6], &ask.born_ms)
            and _number32(&head.fields[7], &flag)
        ):
            return False
        ask.reconsume_times = 0
        if head.fields[9].at != NULL and not _number32(&head.fields[9], &ask.reconsume_times):
            return False
        if head.fields[10].at != NULL and not _truth(&head.fields[10], &unit):
            return False
        if head.fields[11].at != NULL and not _number32(&head.fields[11], &ignored):
            return False
        if head.fields[12].at != NULL:
            if not _truth(&head.fields[12], &unit):
                return False
            batch = batch or unit
        if ask.sys_flag & SYS_TRANSACTION_MASK:
            return False
        plan = self._plan(&head.fields[1], &ask.plan)
        if plan is None or not 0 <= ask.queue_id < plan.queues:
            return False
        ask.sys_flag |= plan.sys_flag
        ask.start = start
        ask.connection = len(self.connections)
        ask.first = self.item_count
        ask.opaque = head.opaque
        ask.code = head.code
        ask.serialize = <uint8_t>head.serialize
        ask.oneway = head.flag & FLAG_ONEWAY != 0
        ask.queue_offset = 0
        ask.wait = True
        if not self._shared(&head.fields[8], &ask.wait, batch, &noted) or not self._note(
            &ask, plan, scratch_before, &noted, body, body_bytes, flag, batch
        ):
            self.item_count = items_before
            self.scratch_size = scratch_before
            return False
        if not batch:
            self._remember(head, body - head.start, &ask)
        return True

    cdef bint _take_known(self, const uint8_t *at, Py_ssize_t length, Py_ssize_t start) except -1:
        """Note a send whose header has a known shape; False, with nothing changed, if not."""
        cdef uint32_t word = <uint32_t>_i32(at)
        cdef Py_ssize_t header_bytes = word & 0xFFFFFF
        cdef Py_ssize_t body_bytes = length - 4 - header_bytes
        cdef Py_ssize_t items_before = self.item_count
        cdef Py_ssize_t scratch_before = self.scratch_size
        cdef Py_ssize_t turn
        cdef Shape *shape
        cdef Filled filled
        cdef Noted noted
        cdef Ask ask
        cdef Plan plan
        if body_bytes < 0 or body_bytes > self.body_bytes_max:
            return False
        for turn in range(self.shape_count):
            shape = &self.shapes[self.shape_last]
            if <uint32_t>shape.serialize == word >> 24 and _fits(
                shape, at + 4, at + 4 + header_bytes, &filled
            ):
                break
            self.shape_last += 1
            if self.shape_last == self.shape_count:
                self.shape_last = 0
        else:
            return False
        if PyBytes_GET_SIZE(self.store_host) == 0:
            return False
        filled.topic.escaped = False
        plan = self._plan(&filled.topic, &ask.plan)
        if plan is None or filled.numbers[HOLE_QUEUE_ID] >= plan.queues:
            return False
        ask.queue_id = <int32_t>filled.numbers[HOLE_QUEUE_ID]
        ask_for(<const uint8_t *>&plan.queue_ends[ask.queue_id])
        ask.born_ms = filled.numbers[HOLE_BORN_MS]
        ask.opaque = <int32_t>filled.numbers[HOLE_OPAQUE]
        ask.sys_flag = shape.sys_flag | plan.sys_flag
        ask.reconsume_times = shape.reconsume_times
        ask.start = start
        ask.connection = len(self.connections)
        ask.first = items_before
        ask.code = shape.code
        ask.serialize = <uint8_t>shape.serialize
        ask.oneway = shape.oneway
        ask.wait = shape.wait
        ask.queue_offset = 0
        self._fill(shape, &filled, header_bytes, &noted)
        if not self._note(
            &ask, plan, scratch_before, &noted, at + 4 + header_bytes, body_bytes, shape.flag, False
        ):
            self.item_count = items_before
            self.scratch_size = scratch_before
            return False
        self.shaped += 1
        self.credit += self.credit < CREDIT_MAX
        if shape.serialize == SERIALIZE_BINARY:
            self.saw_binary = True
        return True

    cdef int _fill(self, Shape *shape, Filled *filled, Py_ssize_t size, Noted *noted) except -1:
        """What `_shared` makes of the properties, from their shape and what is in its holes."""
        cdef bytes cluster = self.cluster
        cdef const uint8_t *kept = shape.kept
        cdef uint8_t *start
        cdef uint8_t *to
        cdef Hole *hole
        cdef Text *value
        cdef Py_ssize_t number
        memset(noted, 0, sizeof(Noted))
        # Names and values are in the header too, perhaps without a separator at their end.
        self._reserve(size + PyBytes_GET_SIZE(cluster) + 1)
        to = start = self.scratch + self.scratch_size
        for number in range(shape.count):
            hole = &shape.holes[number]
            if hole.kind < HOLE_VALUE:
                continue
            value = &filled.values[number]
            to = _put(to, kept, hole.kept_bytes)
            kept += hole.kept_bytes
            if hole.kind == HOLE_UNIQUE:
                noted.unique_at = <int32_t>(to - start)
                noted.unique_bytes = value.size
            elif hole.kind == HOLE_TAGS:
                noted.tags_at = <int32_t>(to - start)
                noted.tags_bytes = value.size
            elif hole.kind == HOLE_WORDS:
                noted.words_at = <int32_t>(to - start)
                noted.words_bytes = value.size
            to = _put(to, value.at, value.size)
        to = _put(to, kept, shape.kept + shape.kept_bytes - kept)
        to = _put(to, PyBytes_AS_STRING(cluster), PyBytes_GET_SIZE(cluster))
        self.scratch_size = to - self.scratch
        return 0

    cdef int _remember(self, Head *head, Py_ssize_t size, Ask *ask) except -1:
        """Learn the shape of a header that was not known, if there is credit for it."""
        cdef Shape *shape
        self.unknown += 1
        if self.unknown == CREDIT_EVERY:
            self.unknown = 0
            self.credit += REMEMBER_COST
        if self.credit < REMEMBER_COST:
            return 0
        self.credit -= REMEMBER_COST
        if self.shapes == NULL:
            # The last one is there to learn in.
            self.shapes = <Shape *>PyMem_Malloc((SHAPES + 1) * sizeof(Shape))
            if self.shapes == NULL:
                raise MemoryError
        shape = &self.shapes[SHAPES]
        if not _learn(shape, head, size):
            return 0
        shape.reconsume_times = ask.reconsume_times
        shape.wait = ask.wait
        self.shape_last = self.shape_next
        self.shapes[self.shape_last] = shape[0]
        self.shape_next = (self.shape_next + 1) % SHAPES
        if self.shape_count < SHAPES:
            self.shape_count += 1
        return 0

    cdef Plan _plan(self, Text *topic, Py_ssize_t *number):
        cdef Plan plan
        cdef Py_ssize_t index
        cdef uint64_t wanted
        if topic.at == NULL or topic.escaped or topic.size == 0:
            return None
        # Most producers speak of one topic.
        index = len(self.plans)
        if index:
            plan = <Plan>self.plans[index - 1]
            if _is_name(plan, topic.at, topic.size):
                number[0] = index - 1
                return plan
        if topic.size > NAME_BYTES_MAX:
            return None
        if self.guess.at == topic.at and self.guess.size == topic.size:
            wanted = self.guess.hash
        else:
            wanted = name_hash(topic.at, topic.size, self.known.seed)
        plan = self.known.find(topic.at, topic.size, wanted)
        if plan is None:
            plan = self.find(topic.at[:topic.size])
            if plan is None:
                return None
            if _is_name(plan, topic.at, topic.size):
                self.known.add(plan)
        if plan.fed != self.gathering:
            plan.fed = self.gathering
            plan.number = index
            self.plans.append(plan)
        number[0] = plan.number
        return plan

    cdef bint _note(
        self, Ask *ask, Plan plan, Py_ssize_t shared_at, Noted *noted, const uint8_t *body,
        Py_ssize_t body_bytes, int32_t flag, bint batch,
    ) except -1:
        """Note a send and its messages, whose shared properties are made ready."""
        cdef Py_ssize_t fixed_bytes = (
            RECORD_BYTES_MIN - 2 * HOST_V4_BYTES + PyBytes_GET_SIZE(self.born_host)
            + PyBytes_GET_SIZE(self.store_host) + plan.name_bytes
        )
        cdef Py_ssize_t shared_bytes = self.scratch_size - shared_at
        cdef Item *item
        cdef Py_ssize_t index
        if batch:
            if not self._split(body, body_bytes):
                return False
        else:
            item = self._new_item()
            item.body = body
            item.body_bytes = body_bytes
            item.own = NULL
            item.own_bytes = 0
            item.flag = flag
        ask.count = self.item_count - ask.first
        ask.size = 0
        for index in range(ask.first, self.item_count):
            item = &self.items[index]
            item.shared_at = shared_at
            item.shared_bytes = shared_bytes
            if item.own_bytes:
                _note_shared(&item.noted, noted, <int32_t>(item.own_bytes + _needs_end(item)))
            else:
                item.noted = noted[0]
            if _properties_bytes(item) > PROPERTIES_BYTES_MAX:
                return False
            ask.size += fixed_bytes + item.body_bytes + _properties_bytes(item)
        if ask.count == 0 or ask.size > self.record_bytes_max:
            return False
        if self.ask_count == self.ask_room:
            self._more_asks()
        self.asks[self.ask_count] = ask[0]
        self.ask_count += 1
        return True

    cdef bint _shared(self, Text *text, bint *wait, bint batch, Noted *noted) except -1:
        """The properties of a send as they are stored, with the cluster, into the scratch buffer."""
        cdef const uint8_t *names[PAIRS_MAX]
        cdef Py_ssize_t sizes[PAIRS_MAX]
        cdef Py_ssize_t count = 0
        cdef Py_ssize_t size, name_bytes, value_bytes, value_at
        cdef bytes cluster = self.cluster
        cdef bint kept
        cdef uint64_t bit
        cdef uint64_t bits = 0
        cdef const uint8_t *begin
        cdef const uint8_t *end
        cdef const uint8_t *name
        cdef const uint8_t *value
        cdef const uint8_t *stop
        cdef uint8_t *source
        cdef uint8_t *to
        memset(noted, 0, sizeof(Noted))
        size = 0 if text.at == NULL else text.size
        # The text unescaped behind, and in front of it what is made of it.
        self._reserve(2 * size + PyBytes_GET_SIZE(cluster) + 2)
        to = self.scratch + self.scratch_size
        source = to + size + PyBytes_GET_SIZE(cluster) + 2
        begin = text.at
        if size and text.escaped:
            size = _unescape(text.at, size, source)
            if size < 0:
                return False
            begin = source
        if _null(begin, size):
            return False
        if has_high(begin, size) and not _is_utf8(begin, size):
            return False
        end = begin + size
        name = stop = begin
        value = NULL  # of a pair whose name ended
        while stop < end or name < end:
            stop = parting(begin, stop, end)
            if stop < end and stop[0] != 2:
                if stop[0] == 0:
                    return False
                stop += 1
                if value == NULL:
                    value = stop
                continue
            if value != NULL:
                name_bytes = value - 1 - name
                value_bytes = stop - value
                if name_bytes and value_bytes:
                    if count == PAIRS_MAX or _means_something(name, name_bytes):
                        return False
                    bit = <uint64_t>1 << ((name[0] + 8 * name_bytes) & 63)
                    if bits & bit and _among(names, sizes, count, name, name_bytes):
                        return False
                    bits |= bit
                    names[count] = name
                    sizes[count] = name_bytes
                    count += 1
                    kept = True
                    value_at = to - self.scratch - self.scratch_size + name_bytes + 1
                    if _same(name, name_bytes, "WAIT", 4):
                        wait[0] = value_bytes == 4 and (
                            (value[0] | 32) == 116 and (value[1] | 32) == 114
                            and (value[2] | 32) == 117 and (value[3] | 32) == 101
                        )
                        kept = batch
                    elif _same(name, name_bytes, "TAGS", 4):
                        noted.tags_at = <int32_t>value_at
                        noted.tags_bytes = <int32_t>value_bytes
                    elif _same(name, name_bytes, "KEYS", 4):
                        noted.words_at = <int32_t>value_at
                        noted.words_bytes = <int32_t>value_bytes
                    elif _same(name, name_bytes, "UNIQ_KEY", 8):
                        noted.unique_at = <int32_t>value_at
                        noted.unique_bytes = <int32_t>value_bytes
                    if kept:
                        to = _put(to, name, stop - name)
                        to[0] = 2
                        to += 1
            stop += 1
            name = stop
            value = NULL
        to = _put(to, PyBytes_AS_STRING(cluster), PyBytes_GET_SIZE(cluster))
        self.scratch_size = to - self.scratch
        return True

    cdef bint _split(self, const uint8_t *body, Py_ssize_t body_bytes) except -1:
        """The items of a batch."""
        cdef const uint8_t *at = body
        cdef const uint8_t *end = body + body_bytes
        cdef const uint8_t *text
        cdef Py_ssize_t size, inner, text_bytes
        cdef Item *item
        while at < end:
            if end - at < ITEM_HEAD_BYTES + 2:
                return False
            size = _i32(at)
            if size < ITEM_HEAD_BYTES + 2 or size > end - at:
                return False
            inner = _i32(at + 16)
            if inner < 0 or inner > size - ITEM_HEAD_BYTES - 2:
                return False
            text = at + ITEM_HEAD_BYTES + inner + 2
            text_bytes = size - ITEM_HEAD_BYTES - inner - 2
            if _i16(text - 2) != text_bytes:
                return False
            if has_high(text, text_bytes) and not _is_utf8(text, text_bytes):
                return False
            item = self._new_item()
            if not _note_own(text, text_bytes, &item.noted):
                return False
            item.body = at + ITEM_HEAD_BYTES
            item.body_bytes = inner
            item.own = text
            item.own_bytes = text_bytes
            item.flag = _i32(at + 12)
            at += size
        return True

    # --- staging -----------------------------------------------------------------------------

    @property
    def left(self):
        """Requests that are not encoded yet."""
        return self.ask_count - self.encoded

    @property
    def next_bytes(self):
        """How much room the records of the next request need, contiguous in one file."""
        return self.asks[self.encoded].size if self.encoded < self.ask_count else 0

    def encode(
        self, bytearray out not None, int64_t log_offset, int64_t room, int64_t store_ms,
        queue_end, list undo not None,
    ):
        """Append the records of as many requests as fit into `room` bytes.

        They begin at `log_offset`. `queue_end` gives the end of a queue; `undo` gets what takes the
        moves of ends back. Returns bytes and messages, and the runs and keys that
        `speed.gather` would find in them.
        """
        global _encodings
        cdef Py_ssize_t first = self.encoded
        cdef Py_ssize_t stop = first
        cdef Py_ssize_t size_before = PyByteArray_GET_SIZE(out)
        cdef int64_t size = 0
        cdef int64_t messages = 0
        cdef Ask *ask
        cdef QueueEnd kept
        cdef Runs runs = Runs()
        _encodings += 1
        try:
            while stop < self.ask_count and size + self.asks[stop].size <= room:
                ask = &self.asks[stop]
                if stop + ENDS_AHEAD < self.ask_count:
                    self._ask_for_end(&self.asks[stop + ENDS_AHEAD])
                kept = (<Plan>self.plans[ask.plan]).queue_end(ask.queue_id, queue_end)
                if kept.mark != _encodings:
                    kept.mark = _encodings
                    kept.run = runs.add(kept)
                ask.run = <int32_t>kept.run
                ask.queue_offset = kept.next
                kept.next += ask.count
                runs.runs[kept.run].count += ask.count
                size += ask.size
                messages += ask.count
                stop += 1
            runs.allot()
            PyByteArray_Resize(out, size_before + size)
            keys = self._records(
                <uint8_t *>PyByteArray_AS_STRING(out) + size_before, first, stop, log_offset, store_ms,
                runs.runs,
            )
        except BaseException:
            PyByteArray_Resize(out, size_before)
            runs.put_back()
            raise
        undo.append(runs.put_back)
        self.encoded = stop
        if stop > first:
            self.portions.append((first, stop, log_offset + size))
        return size, messages, runs, keys

    cdef void _ask_for_end(self, Ask *ask) noexcept:
        ask_for(<const uint8_t *>(<Plan>self.plans[ask.plan]).queue_ends[ask.queue_id])

    cdef bytes _records(
        self, uint8_t *to, Py_ssize_t first, Py_ssize_t stop, int64_t log_offset, int64_t store_ms,
        OneRun *runs,
    ):
        """Write records and their queue entries; the packed keys of all of them."""
        cdef Py_ssize_t number, index, record_bytes, properties_bytes
        cdef Py_ssize_t keys_at = 0
        cdef Ask *ask
        cdef Item *item
        cdef Plan plan
        cdef Facts facts
        cdef uint8_t *entry
        for number in range(first, stop):
            ask = &self.asks[number]
            plan = <Plan>self.plans[ask.plan]
            self.born_host = <bytes>self.born_hosts[ask.connection]
            for index in range(ask.count):
                item = &self.items[ask.first + index]
                item.log_offset = log_offset
                record_bytes = self._record(to, ask, item, plan, ask.queue_offset + index, store_ms)
                properties_bytes = _properties_bytes(item)
                _noted_facts(&item.noted, to + record_bytes - properties_bytes, &facts)
                entry = _put64(runs[ask.run].to, <uint64_t>log_offset)
                entry = _put32(entry, <uint32_t>record_bytes)
                runs[ask.run].to = _put64(entry, <uint64_t>_tags_code(&facts))
                self._reserve_keys(keys_at + _keys_max(&facts) * INDEX_KEY_BYTES)
                keys_at = _put_keys(
                    self.keys + keys_at, <PyObject *>plan.topic, plan.prefix, &facts, log_offset,
                    store_ms,
                ) - self.keys
                to += record_bytes
                log_offset += record_bytes
        return PyBytes_FromStringAndSize(<char *>self.keys, keys_at)

    cdef Py_ssize_t _record(
        self, uint8_t *start, Ask *ask, Item *item, Plan plan, int64_t queue_offset,
        int64_t store_ms,
    ) noexcept:
        cdef Py_ssize_t born_bytes = PyBytes_GET_SIZE(self.born_host)
        cdef Py_ssize_t store_bytes = PyBytes_GET_SIZE(self.store_host)
        cdef int32_t sys_flag = ask.sys_flag & ~(SYS_BORN_V6 | SYS_STORE_V6)
        cdef uint8_t *at
        if born_bytes == HOST_V6_BYTES:
            sys_flag |= SYS_BORN_V6
        if store_bytes == HOST_V6_BYTES:
            sys_flag |= SYS_STORE_V6
        at = _put32(start + 4, <uint32_t>MAGIC_RECORD)
        at = _put32(at, _checksum(item.body, item.body_bytes) & CRC_MASK)
        at = _put32(at, <uint32_t>ask.queue_id)
        at = _put32(at, <uint32_t>item.flag)
        at = _put64(at, <uint64_t>queue_offset)
        at = _put64(at, <uint64_t>item.log_offset)
        at = _put32(at, <uint32_t>sys_flag)
        at = _put64(at, <uint64_t>ask.born_ms)
        at = _put_host(at, self.born_host, born_bytes)
        at = _put64(at, <uint64_t>store_ms)
        at = _put_host(at, self.store_host, store_bytes)
        at = _put32(at, <uint32_t>ask.reconsume_times)
        at = _put64(at, 0)
        at = _put32(at, <uint32_t>item.body_bytes)
        at = _put(at, item.body, item.body_bytes)
        at[0] = <uint8_t>plan.name_bytes
        at = _put(at + 1, plan.name, plan.name_bytes)
        at = _put16(at, <uint32_t>_properties_bytes(item))
        at = _put(at, item.own, item.own_bytes)
        if _needs_end(item):
            at[0] = 2
            at += 1
        at = _put(at, self.scratch + item.shared_at, item.shared_bytes)
        _put32(start, <uint32_t>(at - start))
        return at - start

    def tickets(self):
        """What was encoded: requests by code; and end in the log, wait and ticket of each part."""
        cdef list out = []
        cdef list codes = []
        cdef Py_ssize_t first, stop, number
        cdef Py_ssize_t plain = 0
        cdef Py_ssize_t short = 0
        cdef Py_ssize_t waiting
        for portion in self.portions:
            first, stop, end = portion
            waiting = 0
            for number in range(first, stop):
                waiting += self.asks[number].wait
            if waiting:
                out.append((end, True, self._ticket(first, stop, True, waiting)))
            if waiting < stop - first:
                out.append((end, False, self._ticket(first, stop, False, stop - first - waiting)))
        for number in range(self.encoded):
            if self.asks[number].code == CODE_SEND_V2:
                short += 1
            elif self.asks[number].code == CODE_SEND:
                plain += 1
        if short:
            codes.append((CODE_SEND_V2, short))
        if plain:
            codes.append((CODE_SEND, plain))
        if short + plain < self.encoded:
            codes.append((CODE_SEND_BATCH, self.encoded - short - plain))
        return codes, out

    cdef Ticket _ticket(self, Py_ssize_t first, Py_ssize_t stop, bint wait, Py_ssize_t count):
        cdef Ticket ticket
        cdef Py_ssize_t number, index
        cdef Py_ssize_t messages = 0
        for number in range(first, stop):
            if self.asks[number].wait == wait:
                messages += self.asks[number].count
        ticket = Ticket()
        ticket.asks = <Ask *>PyMem_Malloc(count * sizeof(Ask))
        ticket.log_offsets = <int64_t *>PyMem_Malloc(messages * sizeof(int64_t))
        if ticket.asks == NULL or ticket.log_offsets == NULL:
            raise MemoryError
        ticket.plans = list(self.plans)
        ticket.connections = list(self.connections)
        for number in range(first, stop):
            if self.asks[number].wait == wait:
                ticket.asks[ticket.count] = self.asks[number]
                ticket.asks[ticket.count].first = ticket.messages
                for index in range(self.asks[number].count):
                    ticket.log_offsets[ticket.messages] = self.items[
                        self.asks[number].first + index
                    ].log_offset
                    ticket.messages += 1
                ticket.count += 1
        return ticket

    # --- room --------------------------------------------------------------------------------

    cdef int _more_asks(self) except -1:
        cdef Py_ssize_t room = 64 if self.ask_room == 0 else 2 * self.ask_room
        cdef Ask *asks = <Ask *>PyMem_Realloc(self.asks, room * sizeof(Ask))
        if asks == NULL:
            raise MemoryError
        self.asks = asks
        self.ask_room = room
        return 0

    cdef Item *_new_item(self) except NULL:
        cdef Py_ssize_t room
        cdef Item *items
        if self.item_count == self.item_room:
            room = 64 if self.item_room == 0 else 2 * self.item_room
            items = <Item *>PyMem_Realloc(self.items, room * sizeof(Item))
            if items == NULL:
                raise MemoryError
            self.items = items
            self.item_room = room
        self.item_count += 1
        return &self.items[self.item_count - 1]

    cdef void _let_go(self) noexcept:
        """A huge batch must not keep its memory for ever; tickets have copies."""
        PyMem_Free(self.kept)
        self.kept = NULL
        self.kept_room = 0
        PyMem_Free(self.items)
        PyMem_Free(self.scratch)
        PyMem_Free(self.keys)
        self.items = NULL
        self.scratch = NULL
        self.keys = NULL
        self.keys_room = 0
        self.item_count = self.item_room = self.scratch_size = self.scratch_room = 0

    cdef int _reserve_keys(self, Py_ssize_t size) except -1:
        cdef uint8_t *keys
        if size >= self.keys_room:
            keys = <uint8_t *>PyMem_Realloc(self.keys, 2 * size + 1024)
            if keys == NULL:
                raise MemoryError
            self.keys = keys
            self.keys_room = 2 * size + 1024
        return 0

    cdef int _keep(self, const uint8_t *data, Py_ssize_t size) except -1:
        """Copy frames behind those that are kept; `kept_bytes` stays until some are taken."""
        cdef Py_ssize_t room, index
        cdef uint8_t *kept
        if self.kept_room - self.kept_bytes < size:
            room = 2 * (self.kept_bytes + size)
            kept = <uint8_t *>PyMem_Malloc(room)
            if kept == NULL:
                raise MemoryError
            if self.kept != NULL:
                memcpy(kept, self.kept, self.kept_bytes)
            for index in range(self.item_count):
                self.items[index].body = kept + (self.items[index].body - self.kept)
                if self.items[index].own != NULL:
                    self.items[index].own = kept + (self.items[index].own - self.kept)
            PyMem_Free(self.kept)
            self.kept = kept
            self.kept_room = room
        memcpy(self.kept + self.kept_bytes, data, size)
        return 0

    cdef int _reserve(self, Py_ssize_t more) except -1:
        cdef Py_ssize_t room
        cdef uint8_t *scratch
        if self.scratch_room - self.scratch_size >= more:
            return 0
        room = 2 * (self.scratch_size + more)
        scratch = <uint8_t *>PyMem_Realloc(self.scratch, room)
        if scratch == NULL:
            raise MemoryError
        self.scratch = scratch
        self.scratch_room = room
        return 0


cdef inline uint8_t *_put_host(uint8_t *at, bytes host, Py_ssize_t size) noexcept:
    if size == 8:  # nearly always, and compilers make one move of it
        memcpy(at, PyBytes_AS_STRING(host), 8)
        return at + 8
    return _put(at, PyBytes_AS_STRING(host), size)


cdef inline void _noted_facts(Noted *noted, const uint8_t *properties, Facts *facts) noexcept nogil:
    """What `native` finds in stored properties; no level: the lane takes none."""
    facts.level = 0
    facts.tags = properties + noted.tags_at if noted.tags_bytes else NULL
    facts.tags_bytes = noted.tags_bytes
    facts.words = properties + noted.words_at if noted.words_bytes else NULL
    facts.words_bytes = noted.words_bytes
    facts.unique = properties + noted.unique_at if noted.unique_bytes else NULL
    facts.unique_bytes = noted.unique_bytes


cdef inline bint _needs_end(Item *item) noexcept nogil:
    """Whether a separator is missing between the two parts of the properties."""
    return item.own_bytes != 0 and item.own[item.own_bytes - 1] != 2


cdef inline Py_ssize_t _properties_bytes(Item *item) noexcept nogil:
    return item.own_bytes + _needs_end(item) + item.shared_bytes


cdef bint _note_own(const uint8_t *begin, Py_ssize_t size, Noted *noted) noexcept nogil:
    """What dispatch needs of the properties of an item, in one walk; of two equal names the last.

    False when there is a zero, or perhaps a name that means something.
    """
    cdef const uint8_t *end = begin + size
    cdef const uint8_t *name = begin
    cdef const uint8_t *stop = begin
    cdef const uint8_t *value = NULL  # of a pair whose name ended
    cdef Py_ssize_t name_bytes
    memset(noted, 0, sizeof(Noted))
    while name < end:
        stop = parting(begin, stop, end)
        if stop < end and stop[0] != 2:
            if stop[0] == 0:
                return False
            stop += 1
            if value == NULL:
                value = stop
            continue
        name_bytes = (stop if value == NULL else value - 1) - name
        if name_bytes and (name[0] == 68 or name[0] == 84):  # D or T: DELAY, TRAN_MSG, TIMER_...
            if _means_something(name, name_bytes):
                return False
        if value != NULL and stop > value:
            if _same(name, name_bytes, "TAGS", 4):
                noted.tags_at = <int32_t>(value - begin)
                noted.tags_bytes = <int32_t>(stop - value)
            elif _same(name, name_bytes, "KEYS", 4):
                noted.words_at = <int32_t>(value - begin)
                noted.words_bytes = <int32_t>(stop - value)
            elif _same(name, name_bytes, "UNIQ_KEY", 8):
                noted.unique_at = <int32_t>(value - begin)
                noted.unique_bytes = <int32_t>(stop - value)
        stop += 1
        name = stop
        value = NULL
    return True


cdef inline void _note_shared(Noted *noted, Noted *shared, int32_t behind) noexcept nogil:
    """Shared properties come behind an item's own, so what is in both is theirs."""
    if shared.tags_bytes:
        noted.tags_at = shared.tags_at + behind
        noted.tags_bytes = shared.tags_bytes
    if shared.words_bytes:
        noted.words_at = shared.words_at + behind
        noted.words_bytes = shared.words_bytes
    if shared.unique_bytes:
        noted.unique_at = shared.unique_at + behind
        noted.unique_bytes = shared.unique_bytes


cdef bint _among(
    const uint8_t **names, const Py_ssize_t *sizes, Py_ssize_t count, const uint8_t *name,
    Py_ssize_t name_bytes,
) noexcept nogil:
    cdef Py_ssize_t index
    for index in range(count):
        if sizes[index] == name_bytes and memcmp(names[index], name, name_bytes) == 0:
            return True
    return False


cdef bint _means_something(const uint8_t *at, Py_ssize_t size) noexcept nogil:
    """Whether the slow lane acts on a property of this name."""
    return (
        _same(at, size, "DELAY", 5) or _same(at, size, "TRAN_MSG", 8)
        or _same(at, size, "CLUSTER", 7) or (size >= 6 and memcmp(at, <const char *>"TIMER_", 6) == 0)
    )
