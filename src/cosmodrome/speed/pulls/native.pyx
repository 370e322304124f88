# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True
# cython: initializedcheck=False
"""The inner loops of the fast lane's half for consumers: pulls in, records out.

Theory of operation. Most of what decides about a pull is the same for the next pull of the same
consumer: its group, its topic, its filter. A `PullPlan` keeps that verdict, which the slow lane's
own checks made, together with the very objects it was made of. Those are replaced when they
change, never changed in place, so a plan holds for as long as the tables still have the same
objects in them; that is looked up for every pull, and nobody has to be told of a change. What may change at any moment otherwise comes with every call.

So a pull costs a header, a few look-ups and the choice of records. Where nothing waits to be
written to the connection, replies go straight from the maps of the log into its socket, all those
of a call together; else, and for what the kernel does not take at once, they are copied into
`bytes`. Whatever is unusual in the least (no plan, several log files, cold or
expired or damaged data) ends the walk, and the caller goes the longer way with that frame.

Files that were read last are remembered by weak references to their views, which the store drops
when it closes them: neither is a file that is gone read on, nor does anybody here keep it open.

What a call served is noted in the plans, until `count` adds it to the counts of all pulls.
"""

from cpython.buffer cimport PyBUF_SIMPLE, PyBuffer_Release, PyObject_GetBuffer
from cpython.bytearray cimport PyByteArray_GET_SIZE
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from cpython.dict cimport PyDict_GetItem
from cpython.mem cimport PyMem_Free, PyMem_Malloc
from cpython.object cimport PyObject
from libc.stdint cimport int32_t, int64_t, uint8_t, uint32_t, uint64_t
from libc.string cimport memcmp, memcpy

from weakref import ref as weak

from cosmodrome import layout
from cosmodrome.speed.lane.native cimport (
    CODE_COMMIT,
    CODE_PULL,
    GetCounts,
    Head,
    Template,
    Text,
    _digits,
    _frame,
    _null,
    _number,
    _read_head,
    _string,
)
from cosmodrome.speed.core.native cimport (
    Choice,
    _choose,
    _codes,
    _copy,
    _i16,
    _i32,
    _i64,
    _put,
    _put16,
    _put32,
    _put64,
)

cdef extern from *:
    void __builtin_prefetch(const void *at) noexcept nogil

cdef int SERIALIZE_BINARY = layout.SERIALIZE_BINARY
cdef int32_t FLAG_ONEWAY = layout.FLAG_ONEWAY
cdef Py_ssize_t QUEUE_ENTRY_BYTES = layout.QUEUE_ENTRY_BYTES
cdef int64_t FRAME_BYTES_MAX = layout.FRAME_BYTES_MAX

cdef enum:  # why a walk ended, and flags of a pull, as in `layout`
    LANE_NOTHING = 0
    LANE_PULL = 1
    LANE_COMMIT = 2
    LANE_OTHER = 3
    LANE_FULL = 4  # much is to be written first, or much was done
    LANE_HOLD = 5
    PULL_COMMIT = 1
    PULL_SUSPEND = 2
    PULL_SUBSCRIPTION = 4

cdef enum:
    KEY_BYTES_MAX = 1024
    HEAD_BYTES_MAX = 1024
    PLANS_MAX = 16384
    PLANS_SWEPT_FIRST = 512
    OUT_BYTES_MAX = 524288
    COMMITS_MAX = 16  # in one walk: those of new groups take long


include "out.pxi"


def takes(template):
    """Whether replies can be made from such a template: from a compiled one."""
    return isinstance(template, Template)


def sniff(view, Py_ssize_t at):
    """Whether the frame there looks like a pull or a commit; a guess to choose by, no more."""
    cdef Py_buffer buffer
    cdef const uint8_t *start
    PyObject_GetBuffer(view, &buffer, PyBUF_SIMPLE)
    start = <const uint8_t *>buffer.buf + at
    try:
        if buffer.len - at < 32:
            return False
        if start[4] == SERIALIZE_BINARY:
            return _i16(start + 8) == CODE_PULL or _i16(start + 8) == CODE_COMMIT
        return memcmp(start + 8, <const char *>"{\"code\":1", 9) == 0 and start[18] == 44 and (
            start[17] == 49 or start[17] == 53
        )
    finally:
        PyBuffer_Release(&buffer)


cdef class PullPlan:
    """What was found out about the pulls of a group for a queue, and from what.

    `online` and `subscription` are what heartbeats brought; None when the pull brought its filter.
    `codes` are the tags that are wanted, None for all.
    """

    cdef readonly str group, topic
    cdef readonly int32_t queue_id
    cdef readonly object text, kind
    cdef readonly int64_t version
    cdef readonly int32_t flags  # only whether the pull brings its filter
    cdef readonly object codes
    cdef object group_row, topic_row, online, subscription, model
    cdef int64_t near_id, far_id
    cdef uint32_t *wanted
    cdef Py_ssize_t wanted_count
    cdef readonly tuple queue_key  # topic and queue id
    cdef tuple key  # group, topic and queue id
    cdef bint owes
    cdef int64_t calls, messages, size, next_offset
    cdef int64_t served_as  # number of its last pull among all
    cdef object file_seen  # the file of the queue that was read last, and where it begins
    cdef int64_t file_seen_base

    def __cinit__(self):
        self.wanted = NULL

    def __init__(
        self, str group not None, str topic not None, int32_t queue_id, int32_t flags,
        int64_t version, text, kind, group_row, topic_row, online, subscription, model, codes,
        int64_t near_id, int64_t far_id,
    ):
        self.group = group
        self.topic = topic
        self.queue_id = queue_id
        self.flags = flags & PULL_SUBSCRIPTION
        self.version = version
        self.text = text
        self.kind = kind
        self.group_row = group_row
        self.topic_row = topic_row
        self.online = online
        self.subscription = subscription
        self.model = model
        self.codes = codes
        self.near_id = near_id
        self.far_id = far_id
        self.queue_key = (topic, queue_id)
        self.key = (group, topic, queue_id)
        self.file_seen_base = -1
        self.wanted_count = 0
        if codes is not None:
            self.wanted_count = _codes(codes, &self.wanted)

    def __dealloc__(self):
        PyMem_Free(self.wanted)


cdef class Held:
    """A pull that found nothing yet, and all that is needed to answer it."""

    cdef readonly PullPlan plan
    cdef readonly Py_ssize_t end  # of its frame
    cdef readonly int serialize
    cdef readonly int32_t opaque
    cdef readonly int32_t flags
    cdef readonly int32_t count
    cdef readonly int64_t offset
    cdef readonly int64_t commit
    cdef readonly int64_t wait_ms


cdef class Pulls:
    """Serves pulls and commits out of read buffers; see the module's theory.

    `groups` and `topics` are the live tables, `online` finds a group that has members. `source` reads
    the store. `commit` takes group, topic, queue and offset. Replies are made from templates, one per serialize form.
    """

    cdef dict groups, topics, queues, plans
    cdef Py_ssize_t sweep_at  # so many plans are looked through
    cdef object online, source, options, log, flush, commit
    cdef tuple found, done
    cdef list owing  # plans that have something to count
    cdef GetCounts counts
    cdef int64_t served_total
    cdef bint master
    cdef bint busy
    cdef int64_t segment_bytes, scan_count_min
    cdef object log_seen  # the file of the log that was read last, and where it begins
    cdef int64_t log_seen_base
    # of the call under way
    cdef Choice choice
    cdef int64_t count_max, cold_count_max, min_offset, end
    cdef int64_t log_base
    cdef Py_buffer log_buffer
    cdef bint has_log, slave_read
    cdef int64_t least, most  # of the queue that was read last
    cdef Py_ssize_t out_bytes
    cdef list out  # replies that are not for the outlet
    cdef Outlet outlet
    # of the last call
    cdef readonly Py_ssize_t pulls, commits
    cdef readonly bint saw_binary
    cdef readonly Held held
    cdef bytes unknown

    def __cinit__(self):
        self.choice.spans = NULL
        self.choice.span_room = 0

    def __init__(
        self, dict groups not None, dict topics not None, online, source, commit, tuple found not None, tuple done not None, bint master,
        GetCounts counts not None,
    ):
        for template in (*found, *done):
            if not isinstance(template, Template):
                raise TypeError("replies are made from templates")
        for template in found:
            if (<Template>template).holes != 4 or (<Template>template).fixed_bytes > HEAD_BYTES_MAX - 128:
                raise ValueError("this is not the template of a pull's reply")
        self.groups = groups
        self.topics = topics
        self.online = online
        self.source = source
        self.queues = source.queues
        self.options = source.options
        self.log = source.log
        self.flush = source.flush
        self.segment_bytes = source.segment_bytes
        self.scan_count_min = source.scan_count_min
        self.commit = commit
        self.found = found
        self.done = done
        self.master = master
        self.plans = {}
        self.sweep_at = PLANS_SWEPT_FIRST
        self.owing = []
        self.counts = counts
        self.outlet = Outlet()
        self.log_seen_base = -1

    def __dealloc__(self):
        PyMem_Free(self.choice.spans)

    # --- serving -----------------------------------------------------------------------------

    def feed(self, view, Py_ssize_t at, bint slave_read, list out not None, connection):
        """Serve pulls and commits from `at` on.

        Replies are written to the socket that `connection` lends, as far as it takes them at once; the
        others are added to `out`.

        Returns where the first frame begins that was not served, and why it was not.
        """
        cdef Py_buffer buffer
        cdef int why
        if self.busy:
            raise RuntimeError("pulls are being served already")
        self.pulls = self.commits = 0
        self.saw_binary = False
        self.held = None
        self.unknown = None
        PyObject_GetBuffer(view, &buffer, PyBUF_SIMPLE)
        try:
            self._begin(slave_read, out, connection)
            why = self._walk(<const uint8_t *>buffer.buf, &at, buffer.len)
            self.outlet.push(out)
            return at, why
        finally:
            self._end()
            PyBuffer_Release(&buffer)

    def serve(self, Held held not None, bint slave_read):
        """The reply of a pull that was held, None when it has to be made the longer way."""
        if self.busy:
            raise RuntimeError("pulls are being served already")
        try:
            self._begin(slave_read, [], None)
            if not self._holds(held.plan) or not self._find(held.plan, held.offset, held.count):
                return None
            self._say(held.plan, <Template>self.found[held.serialize], held.opaque, held.offset)
            self._count(held.plan)
            return self.out[0]
        finally:
            self._end()

    def learn(self, PullPlan plan not None):
        """Remember the plan of the pull that the last walk ended at for want of one."""
        if self.unknown is not None:
            if len(self.plans) >= self.sweep_at:
                self._sweep()
            self.plans[self.unknown] = plan
            self.unknown = None

    @property
    def plan_count(self):
        return len(self.plans)

    cdef int _sweep(self) except -1:
        """Forget plans that hold no more: they keep what clients brought that left long ago."""
        cdef dict kept = {}
        for key, plan in self.plans.items():
            if self._holds(plan):
                kept[key] = plan
        self.plans = kept if len(kept) < PLANS_MAX else {}
        self.sweep_at = min(PLANS_MAX, max(PLANS_SWEPT_FIRST, 2 * len(self.plans)))

    @property
    def wants_plan(self):
        """Whether the last walk ended for want of a plan."""
        return self.unknown is not None

    cdef int _begin(self, bint slave_read, list out, connection) except -1:
        self.busy = True
        self.out = out
        self.outlet.open(connection)
        self.has_log = False
        self.out_bytes = 0
        self.slave_read = slave_read
        self.min_offset = self.log.min_offset
        self.end = self.flush.durable_end
        options = self.options
        self.count_max = options.max_transfer_count_on_message_in_memory
        self.choice.bytes_max = options.max_transfer_bytes_on_message_in_memory
        self.cold_count_max = options.max_transfer_count_on_message_in_disk
        self.choice.cold_bytes_max = options.max_transfer_bytes_on_message_in_disk
        self.choice.cold_below = self.end - <int64_t>self.source.warm_bytes
        return 0

    cdef int _end(self) except -1:
        if self.has_log:
            PyBuffer_Release(&self.log_buffer)
            self.has_log = False
        self.outlet.close()
        self.out = None
        self.busy = False
        return 0

    cdef int _walk(self, const uint8_t *data, Py_ssize_t *position, Py_ssize_t size) except -1:
        cdef Head head
        cdef const uint8_t *body = NULL
        cdef Py_ssize_t body_bytes = 0
        cdef Py_ssize_t at = position[0]
        cdef Py_ssize_t length
        cdef int why
        while True:
            position[0] = at
            length = _frame(data + at, size - at)
            if length <= 0:
                return LANE_NOTHING if length == 0 else LANE_OTHER
            if self.out_bytes >= OUT_BYTES_MAX or self.commits >= COMMITS_MAX:
                return LANE_FULL
            if not _read_head(data + at + 4, length, &head, &body, &body_bytes):
                return LANE_OTHER
            if head.code == CODE_PULL:
                why = self._pull(&head, at + 4 + length)
            elif head.code == CODE_COMMIT:
                why = self._commit(&head)
            else:
                return LANE_OTHER
            if why != LANE_NOTHING:
                return why
            if head.serialize == SERIALIZE_BINARY:
                self.saw_binary = True
            at += 4 + length

    cdef int _pull(self, Head *head, Py_ssize_t end) except -1:
        cdef int64_t queue_id = 0, count = 0, flags = 0, most = 0
        cdef int64_t offset = 0, commit = 0, wait_ms = 0, version = 0
        cdef PullPlan plan
        cdef bytes key
        cdef PyObject *known
        if head.flag & FLAG_ONEWAY:
            return LANE_PULL
        if not (
            _number(&head.fields[2], &queue_id) and _number(&head.fields[3], &commit)
            and _number(&head.fields[4], &offset) and _number(&head.fields[5], &count)
            and _number(&head.fields[6], &flags) and _number(&head.fields[7], &wait_ms)
            and _number(&head.fields[8], &version)
        ):
            return LANE_PULL
        if head.fields[11].at != NULL and not _number(&head.fields[11], &most):
            return LANE_PULL
        if not (_small(queue_id) and _small(count) and _small(flags) and _small(most)):
            return LANE_PULL
        key = self._key(head, <int32_t>queue_id, version, <int32_t>flags & PULL_SUBSCRIPTION)
        if key is None:
            return LANE_PULL
        known = PyDict_GetItem(self.plans, key)
        if known == NULL:
            self.unknown = key
            return LANE_PULL
        plan = <PullPlan>known
        if not self._holds(plan):
            del self.plans[key]
            self.unknown = key
            return LANE_PULL
        try:
            if not self._find(plan, offset, <int32_t>count):
                if flags & PULL_SUSPEND and wait_ms > 0 and self._nothing_yet(plan, offset):
                    self._hold(plan, head, end, <int32_t>flags, <int32_t>count, offset, commit, wait_ms)
                    return LANE_HOLD
                return LANE_PULL
            if flags & PULL_COMMIT and self.master:
                self.commit(plan.group, plan.topic, plan.queue_id, commit)
            self._say(plan, <Template>self.found[head.serialize], head.opaque, offset)
        except Exception:
            return LANE_PULL  # it will fail there too, where it is logged and answered
        self._count(plan)
        self.pulls += 1
        return LANE_NOTHING

    cdef int _commit(self, Head *head) except -1:
        cdef int64_t queue_id = 0, offset = 0
        cdef Template template
        cdef bytes reply
        cdef Py_ssize_t size
        if not (_number(&head.fields[2], &queue_id) and _number(&head.fields[3], &offset)):
            return LANE_COMMIT
        if not _small(queue_id):
            return LANE_COMMIT
        group, topic = _string(&head.fields[0]), _string(&head.fields[1])
        if group is None or topic is None:
            return LANE_COMMIT
        try:
            self.commit(group, topic, queue_id, offset)
        except Exception:
            return LANE_COMMIT
        self.commits += 1
        if not head.flag & FLAG_ONEWAY:
            template = <Template>self.done[head.serialize]
            reply = <bytes>template.head(head.opaque, 0)
            size = PyBytes_GET_SIZE(reply)
            self.out_bytes += size
            if not self.outlet.take(
                <const uint8_t *>PyBytes_AS_STRING(reply), size, NULL, self.out
            ):
                self.out.append(reply)
        return LANE_NOTHING

    # --- plans -------------------------------------------------------------------------------

    cdef bytes _key(self, Head *head, int32_t queue_id, int64_t version, int32_t flags):
        """All that a plan depends on; None when the slow lane might read it differently."""
        cdef uint8_t key[KEY_BYTES_MAX]
        cdef uint8_t *to = key
        cdef Text *text
        cdef int slot
        cdef int number
        to = _put32(to, <uint32_t>queue_id)
        to = _put64(to, <uint64_t>version)
        to[0] = <uint8_t>flags
        to += 1
        for number in range(4):
            slot = 0 if number == 0 else 1 if number == 1 else 7 + number  # 9 and 10
            text = &head.fields[slot]
            if text.at == NULL:
                if slot < 2:
                    return None
                to = _put16(to, 0xFFFF)
                continue
            if text.escaped or text.size > (KEY_BYTES_MAX - 32) // 4:
                return None
            if slot > 1 and _null(text.at, text.size):
                return None
            to = _put16(to, <uint32_t>text.size)
            to = _put(to, text.at, text.size)
        return PyBytes_FromStringAndSize(<char *>key, to - key)

    cdef bint _holds(self, PullPlan plan) except -1:
        """Whether everything that the plan was made of is still there."""
        cdef PyObject *row = PyDict_GetItem(self.groups, plan.group)
        if row != <PyObject *>plan.group_row:
            return False
        row = PyDict_GetItem(self.topics, plan.topic)
        if row != <PyObject *>plan.topic_row:
            return False
        if plan.online is None:
            return True
        return (
            self.online(plan.group) is plan.online
            and plan.online.subscriptions.get(plan.topic) is plan.subscription
            and plan.online.message_model == plan.model
        )

    cdef int _hold(
        self, PullPlan plan, Head *head, Py_ssize_t end, int32_t flags, int32_t count,
        int64_t offset, int64_t commit, int64_t wait_ms,
    ) except -1:
        cdef Held held = Held()
        held.plan = plan
        held.end = end
        held.serialize = head.serialize
        held.opaque = head.opaque
        held.flags = flags
        held.count = count
        held.offset = offset
        held.commit = commit
        held.wait_ms = wait_ms
        self.held = held
        return 0

    # --- reading -----------------------------------------------------------------------------

    cdef bint _nothing_yet(self, PullPlan plan, int64_t offset) except -1:
        """Whether the queue ends where the pull begins."""
        cdef PyObject *found = PyDict_GetItem(self.queues, plan.queue_key)
        cdef int64_t tail_at
        cdef bytearray tail
        if found == NULL:
            return offset == 0
        queue = <object>found
        tail_at = queue.tail_at
        tail = queue.tail
        return (tail_at + PyByteArray_GET_SIZE(tail)) // QUEUE_ENTRY_BYTES == offset

    cdef bint _find(self, PullPlan plan, int64_t offset, int32_t asked) except -1:
        """Choose the records of a pull; false when it is not a plain one."""
        cdef Choice *choice = &self.choice
        cdef PyObject *found = PyDict_GetItem(self.queues, plan.queue_key)
        cdef const uint8_t *entries
        cdef int64_t least, most, tail_at, position, wanted, available
        cdef int64_t file_base = 0
        cdef int64_t file_bytes = 0  # none: the entries are in memory
        cdef int64_t max_count = asked if asked > 1 else 1
        cdef bytearray tail
        cdef Py_buffer buffer
        if found == NULL or offset < 0:
            return False
        queue = <object>found
        tail = queue.tail
        tail_at = queue.tail_at
        least = queue.min_offset
        most = (tail_at + PyByteArray_GET_SIZE(tail)) // QUEUE_ENTRY_BYTES
        if offset < least or offset >= most:
            return False
        wanted = min(max(max_count, self.scan_count_min), most - offset)
        position = offset * QUEUE_ENTRY_BYTES
        if position >= tail_at:
            PyObject_GetBuffer(tail, &buffer, PyBUF_SIMPLE)
            position -= tail_at
        else:
            file_bytes = queue.file_bytes
            file_base = position - position % file_bytes
            view = plan.file_seen() if plan.file_seen_base == file_base else None
            if view is None:
                view = queue.file_view(file_base)
                plan.file_seen = weak(view)
                plan.file_seen_base = file_base
            PyObject_GetBuffer(view, &buffer, PyBUF_SIMPLE)
            position -= file_base
        try:
            available = buffer.len
            if file_bytes:
                available = min(available, min(file_bytes, tail_at - file_base))
            available = min((available - position) // QUEUE_ENTRY_BYTES, wanted)
            entries = <const uint8_t *>buffer.buf + position
            if available <= 0 or not self._turn_to(_i64(entries)):
                return False
            choice.queue_id = plan.queue_id
            choice.queue_offset = offset
            choice.codes = plan.wanted
            choice.code_count = plan.wanted_count
            choice.count = choice.taken_bytes = 0
            choice.count_max = min(max_count, self.count_max)
            choice.cold_count_max = min(max_count, self.cold_count_max)
            self._warm(entries, min(available, choice.count_max))
            _choose(choice, entries, 0, available)
        finally:
            PyBuffer_Release(&buffer)
        if choice.count == 0 or not (choice.full or choice.index == wanted):
            return False
        if choice.found_bytes > FRAME_BYTES_MAX - HEAD_BYTES_MAX:
            return False  # the slow lane says whether a frame takes that much
        self.least = least
        self.most = most
        return True

    cdef bint _turn_to(self, int64_t log_offset) except -1:
        """Open the log file of a record, if all of it may be read; one stays open per call."""
        cdef int64_t base
        if log_offset < 0:
            return False
        base = log_offset - log_offset % self.segment_bytes
        if base < self.min_offset or base >= self.end:
            return False
        if not self.has_log or self.log_base != base:
            if self.has_log:
                self.outlet.push(self.out)
                PyBuffer_Release(&self.log_buffer)
                self.has_log = False
            view = self.log_seen() if self.log_seen_base == base else None
            if view is None:
                try:
                    view = self.log.view(base)
                except OSError:
                    return False
                self.log_seen = weak(view)
                self.log_seen_base = base
            PyObject_GetBuffer(view, &self.log_buffer, PyBUF_SIMPLE)
            self.has_log = True
            self.log_base = base
            self.choice.data = <const uint8_t *>self.log_buffer.buf
            self.choice.base = self.choice.low = base
            self.choice.high = min(self.end, base + self.log_buffer.len)
        return True

    cdef void _warm(self, const uint8_t *entries, int64_t count) noexcept nogil:
        """Have the heads of the records fetched side by side: they lie far apart."""
        cdef int64_t at
        cdef int64_t number
        cdef int64_t size = self.log_buffer.len
        for number in range(min(count, 64)):
            at = _i64(entries + number * QUEUE_ENTRY_BYTES) - self.log_base
            if 0 <= at < size:
                __builtin_prefetch(self.choice.data + at)

    cdef int _say(self, PullPlan plan, Template template, int32_t opaque, int64_t offset) except -1:
        """Reply with what was found."""
        cdef uint8_t head[HEAD_BYTES_MAX]
        cdef int64_t numbers[4]
        cdef uint8_t *to
        cdef Py_ssize_t number, size
        cdef bytes out
        numbers[0] = 0
        if self.slave_read:
            numbers[0] = plan.far_id if self.choice.last < self.choice.cold_below else plan.near_id
        numbers[1] = offset + self.choice.index
        numbers[2] = self.least
        numbers[3] = self.most
        to = template._part(head + 8, 0)
        for number in range(4):
            size = _digits(to, numbers[number])
            if template.binary:
                _put32(to - 4, <uint32_t>size)
            to = template._part(to + size, number + 1)
        size = template._end(head, to, opaque, self.choice.found_bytes)
        self.out_bytes += size + self.choice.found_bytes
        if not self.outlet.take(head, size, &self.choice, self.out):
            out = PyBytes_FromStringAndSize(NULL, size + self.choice.found_bytes)
            to = <uint8_t *>PyBytes_AS_STRING(out)
            memcpy(to, head, size)
            _copy(&self.choice, to + size)
            self.out.append(out)
        return 0

    # --- counting ----------------------------------------------------------------------------

    cdef int _count(self, PullPlan plan) except -1:
        if not plan.owes:
            plan.owes = True
            self.owing.append(plan)
        self.served_total += 1
        plan.served_as = self.served_total
        plan.calls += 1
        plan.messages += self.choice.count
        plan.size += self.choice.found_bytes
        plan.next_offset = self.choice.queue_offset + self.choice.index
        return 0

    def count(self, double ms):
        """Count what was served since the last time, which took so long."""
        cdef PullPlan plan
        cdef int64_t calls = 0
        if len(self.owing) > 1:
            # The last one to read a queue says where its group reads next.
            self.owing.sort(key=_served_as)
        for plan in self.owing:
            calls += plan.calls
        for plan in self.owing:
            self.counts.count(
                plan.key, plan.calls, plan.messages, plan.size, ms / calls, plan.next_offset
            )
            plan.owes = False
            plan.calls = plan.messages = plan.size = 0
        self.owing.clear()


def _served_as(PullPlan plan not None):
    return plan.served_as


cdef inline bint _small(int64_t value) noexcept nogil:
    return -0x80000000LL <= value <= 0x7FFFFFFFLL
