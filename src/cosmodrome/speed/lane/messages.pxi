# Part of native.pyx: what is known of topics, and sends as they are noted (the twin: messages.py).

cdef class Plan:
    """What the lane knows about a topic that takes messages without a second thought."""

    cdef readonly str topic
    cdef PyObject **queue_ends  # by queue id, as the log gave them; NULL: not met yet
    cdef int32_t queues
    cdef int32_t sys_flag  # bits that its messages get
    cdef uint32_t prefix  # of the hashes of its keys
    cdef int32_t name_bytes
    cdef uint64_t fed  # the gathering that it was met in last
    cdef Py_ssize_t number  # among the plans of that gathering
    cdef int64_t requests, messages, size  # of the tickets that are being answered
    cdef uint8_t name[NAME_BYTES_MAX]  # the end of it is not met with most names

    def __cinit__(self):
        self.queue_ends = NULL
        self.fed = 0
        self.queues = 0
        self.requests = self.messages = self.size = 0

    def __dealloc__(self):
        cdef Py_ssize_t queue_id
        if self.queue_ends != NULL:
            for queue_id in range(self.queues):
                Py_XDECREF(self.queue_ends[queue_id])
            PyMem_Free(self.queue_ends)

    def __init__(self, str topic not None, int32_t queues, int32_t sys_flag):
        cdef bytes name = topic.encode()
        if queues < 0 or self.queue_ends != NULL:
            raise ValueError(f"{queues} queues")
        if not 0 < len(name) <= NAME_BYTES_MAX:
            raise ValueError(f"{topic!r} cannot be a topic")
        self.topic = topic
        self.name_bytes = <int32_t>len(name)
        memcpy(self.name, PyBytes_AS_STRING(name), self.name_bytes)
        self.sys_flag = sys_flag
        self.prefix = _prefix(topic)
        self.queue_ends = <PyObject **>PyMem_Calloc(queues + 1, sizeof(PyObject *))
        if self.queue_ends == NULL:
            raise MemoryError
        self.queues = queues

    cdef QueueEnd queue_end(self, int32_t queue_id, find):
        """The end of a queue; `find` gives it when it is not known or its queue is gone."""
        cdef PyObject *known = self.queue_ends[queue_id]
        cdef QueueEnd queue_end
        if known != NULL and (<QueueEnd>known).next >= 0:
            return <QueueEnd>known
        queue_end = <QueueEnd?>find(self.topic, queue_id)
        Py_INCREF(queue_end)
        self.queue_ends[queue_id] = <PyObject *>queue_end
        Py_XDECREF(known)
        return queue_end


cdef extern from *:
    """
    /* Of a name; whoever does not know the seed cannot choose names that meet. */
    static inline uint64_t name_hash(const uint8_t *at, Py_ssize_t size, uint64_t seed) {
        const uint64_t factor = 0x9E3779B97F4A7C15u;
        uint64_t some = 0, hash = seed ^ (uint64_t)size;
        const uint8_t *end = at + size;
        if (size < 8) {
            for (; at < end; at++)
                some = some << 8 | *at;
        } else {
            for (; end - at > 8; at += 8) {
                memcpy(&some, at, 8);
                hash = (hash ^ some) * factor;
                hash ^= hash >> 32;
            }
            memcpy(&some, end - 8, 8);  /* some of these were seen before */
        }
        hash = (hash ^ some) * factor;
        return hash ^ hash >> 32;
    }
    """
    uint64_t name_hash(const uint8_t *at, Py_ssize_t size, uint64_t seed) noexcept nogil


cdef struct Slot:
    uint64_t hash
    PyObject *plan  # NULL: free


cdef class Plans:
    """Plans by the name of their topic. No Python object is made to look for one."""

    cdef Slot *slots  # a power of two, at most half of them taken
    cdef uint64_t mask
    cdef Py_ssize_t count
    cdef uint64_t seed

    def __cinit__(self):
        self.slots = NULL
        self.mask = 0
        self.count = 0
        self.seed = <uint64_t>hash("the names of topics")  # another one in every process

    def __dealloc__(self):
        self._empty()

    def __len__(self):
        return self.count

    def clear(self):
        self._empty()

    cdef void _empty(self) noexcept:
        cdef Slot *slots = self.slots
        cdef uint64_t room = self.mask + 1
        cdef uint64_t at
        self.slots = NULL
        self.mask = 0
        self.count = 0
        if slots != NULL:
            for at in range(room):
                Py_XDECREF(slots[at].plan)
            PyMem_Free(slots)

    cdef void ask_for_slot(self, uint64_t wanted) noexcept:
        if self.slots != NULL:
            ask_for(<const uint8_t *>&self.slots[wanted & self.mask])

    cdef void ask_for_plan(self, uint64_t wanted) noexcept:
        cdef const uint8_t *plan
        if self.slots != NULL:
            plan = <const uint8_t *>self.slots[wanted & self.mask].plan
            if plan != NULL:
                ask_for(plan)
                ask_for(plan + 64)

    cdef Plan find(self, const uint8_t *name, Py_ssize_t name_bytes, uint64_t wanted):
        """By name and its hash."""
        cdef uint64_t at = wanted & self.mask
        cdef Plan plan
        if self.slots == NULL:
            return None
        while self.slots[at].plan != NULL:
            if self.slots[at].hash == wanted:
                plan = <Plan>self.slots[at].plan
                if _is_name(plan, name, name_bytes):
                    return plan
            at = (at + 1) & self.mask
        return None

    cdef int add(self, Plan plan) except -1:
        """A plan whose name has none."""
        cdef Slot *old = self.slots
        cdef uint64_t old_room = self.mask + 1
        cdef uint64_t room, at
        if old == NULL or 2 * <uint64_t>(self.count + 1) > old_room:
            room = 64 if old == NULL else 2 * old_room
            self.slots = <Slot *>PyMem_Calloc(room, sizeof(Slot))
            if self.slots == NULL:
                self.slots = old
                raise MemoryError
            self.mask = room - 1
            if old != NULL:
                for at in range(old_room):
                    if old[at].plan != NULL:
                        self._put(old[at])
                PyMem_Free(old)
        Py_INCREF(plan)
        self._put(Slot(name_hash(plan.name, plan.name_bytes, self.seed), <PyObject *>plan))
        self.count += 1
        return 0

    cdef void _put(self, Slot slot) noexcept:
        cdef uint64_t at = slot.hash & self.mask
        while self.slots[at].plan != NULL:
            at = (at + 1) & self.mask
        self.slots[at] = slot


cdef inline bint _is_name(Plan plan, const uint8_t *name, Py_ssize_t name_bytes) noexcept:
    return plan.name_bytes == name_bytes and memcmp(plan.name, name, name_bytes) == 0


cdef struct Ahead:
    # The name of a topic in a frame that comes soon, perhaps; its place tells whether it is one.
    const uint8_t *at
    Py_ssize_t size
    uint64_t hash


cdef struct Ask:
    Py_ssize_t start  # of its frame among all that are kept
    Py_ssize_t connection  # number of the one it came from
    Py_ssize_t first  # of its messages among all
    Py_ssize_t count
    Py_ssize_t plan  # number of its plan among all
    int64_t size  # of its records
    int64_t born_ms
    int64_t queue_offset
    int32_t opaque
    int32_t code
    int32_t queue_id
    int32_t sys_flag
    int32_t reconsume_times
    int32_t run  # number of its run among those of its encoding
    uint8_t serialize
    bint oneway
    bint wait


cdef struct Noted:
    # Where in the stored properties the values lie that dispatch needs; without bytes: nowhere.
    int32_t tags_at
    int32_t tags_bytes
    int32_t words_at
    int32_t words_bytes
    int32_t unique_at
    int32_t unique_bytes


cdef struct Item:
    const uint8_t *body
    const uint8_t *own  # properties that stay as they are, in the buffer
    Py_ssize_t body_bytes
    Py_ssize_t own_bytes
    Py_ssize_t shared_at  # properties in the scratch buffer
    Py_ssize_t shared_bytes
    int64_t log_offset
    int32_t flag
    Noted noted
