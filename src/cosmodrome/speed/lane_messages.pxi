# Part of lane.pyx: what is known of topics, and sends as they are noted (the twin: lane_messages.py).

cdef class Plan:
    """What the lane knows about a topic that takes messages without a second thought."""

    cdef readonly str topic
    cdef bytes name
    cdef int32_t queues
    cdef int32_t sys_flag  # bits that its messages get
    cdef list places  # by queue id, as the log gave them
    cdef int64_t calls, messages, size  # requests, messages and bytes that were answered
    cdef uint64_t fed  # the gathering that it was met in last
    cdef Py_ssize_t number  # among the plans of that gathering
    cdef uint32_t prefix  # of the hashes of its keys
    # By queue id, while requests are encoded:
    cdef int64_t *next  # queue offsets
    cdef uint8_t **entries  # where its next queue entry is put
    cdef uint64_t *mark  # the encoding that these are of

    def __cinit__(self):
        self.next = NULL
        self.entries = NULL
        self.mark = NULL
        self.fed = 0
        self.calls = self.messages = self.size = 0

    def __dealloc__(self):
        PyMem_Free(self.next)
        PyMem_Free(self.entries)
        PyMem_Free(self.mark)

    def __init__(self, str topic not None, int32_t queues, int32_t sys_flag):
        if queues < 0 or self.next != NULL:
            raise ValueError(f"{queues} queues")
        self.topic = topic
        self.name = topic.encode()
        self.queues = queues
        self.sys_flag = sys_flag
        self.places = [None] * queues
        if not 0 < len(self.name) <= layout.TOPIC_BYTES_MAX:
            raise ValueError(f"{topic!r} cannot be a topic")
        self.prefix = _prefix(topic)
        self.next = <int64_t *>PyMem_Malloc((queues + 1) * sizeof(int64_t))
        self.entries = <uint8_t **>PyMem_Malloc((queues + 1) * sizeof(uint8_t *))
        self.mark = <uint64_t *>PyMem_Malloc((queues + 1) * sizeof(uint64_t))
        if self.next == NULL or self.entries == NULL or self.mark == NULL:
            raise MemoryError
        memset(self.mark, 0, (queues + 1) * sizeof(uint64_t))

    def take(self):
        """Topic, requests, messages and bytes that were answered since the last time."""
        taken = (self.topic, self.calls, self.messages, self.size)
        self.calls = self.messages = self.size = 0
        return taken


cdef struct Ask:
    Py_ssize_t start  # of its frame among all that are kept
    Py_ssize_t party  # whose it is
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
    bint leads  # the first one of its queue in this encoding
    uint8_t serialize
    bint oneway
    bint wait


cdef struct Noted:
    # Where in the shared properties the values lie that dispatch needs; without bytes: nowhere.
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
