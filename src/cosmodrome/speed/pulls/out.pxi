# Part of native.pyx: replies that leave at once, straight from where their records lie.

cdef extern from *:
    """
    #include <errno.h>
    #include <string.h>
    #ifdef _WIN32
    struct iovec { void *iov_base; size_t iov_len; };
    static Py_ssize_t send_pieces(int fd, struct iovec *pieces, size_t count) { return 0; }
    static void cut(int fd) {}
    #else
    #include <sys/socket.h>
    #include <sys/uio.h>
    #ifndef MSG_NOSIGNAL
    #define MSG_NOSIGNAL 0  /* Python ignores that signal */
    #endif
    /* How many bytes the kernel took without waiting; 0 also for any error, which the next one
       to write will be told. */
    static Py_ssize_t send_pieces(int fd, struct iovec *pieces, size_t count) {
        struct msghdr message;
        ssize_t sent;
        memset(&message, 0, sizeof message);
        message.msg_iov = pieces;
        message.msg_iovlen = count;
        do
            sent = sendmsg(fd, &message, MSG_DONTWAIT | MSG_NOSIGNAL);
        while (sent < 0 && errno == EINTR);
        return sent < 0 ? 0 : sent;
    }
    static void cut(int fd) { shutdown(fd, SHUT_RDWR); }
    #endif
    """
    struct iovec:
        void *iov_base
        size_t iov_len
    Py_ssize_t send_pieces(int fd, iovec *pieces, size_t count) noexcept nogil
    void cut(int fd) noexcept nogil

cdef enum:
    PIECES_MAX = 1024  # as many as one call of the kernel takes
    NOTES_BYTES = 262144  # what is too small to be a piece of its own
    PIECE_BYTES_MIN = 512  # below, copying costs less than a piece does


cdef class Outlet:
    """Replies on their way into one socket, as pieces of memory: maps of the log, and notes.

    The connection whose socket it is (None: nobody's) lends its descriptor when there is a first reply,
    if nothing else waits to be written, and is told how much was. Pieces are only lent: `push` has
    to come before a map is released. What the kernel does not take then is copied to `late`, and
    from there on nothing more is taken here, so that the replies stay in order; whoever owns the
    socket writes the rest.
    """

    cdef object connection
    cdef int fd  # -1: nothing is taken, -2: not asked for yet
    cdef iovec *pieces
    cdef Py_ssize_t count
    cdef uint8_t *notes
    cdef Py_ssize_t noted
    cdef Py_ssize_t waiting_bytes

    def __cinit__(self):
        self.fd = -1
        self.pieces = <iovec *>PyMem_Malloc(PIECES_MAX * sizeof(iovec))
        self.notes = <uint8_t *>PyMem_Malloc(NOTES_BYTES)
        if self.pieces == NULL or self.notes == NULL:
            raise MemoryError

    def __dealloc__(self):
        PyMem_Free(self.pieces)
        PyMem_Free(self.notes)

    cdef void open(self, connection) noexcept:
        self.connection = connection
        self.fd = -1 if connection is None else -2
        self.count = self.noted = self.waiting_bytes = 0

    cdef void close(self) noexcept:
        self.connection = None
        self.fd = -1

    cdef bint take(
        self, const uint8_t *head, Py_ssize_t head_bytes, Choice *choice, list late
    ) except -1:
        """A head with the records that were chosen (NULL: none); false if it was not taken."""
        cdef Py_ssize_t number
        cdef Py_ssize_t spans = 0 if choice == NULL else choice.span_count
        cdef const uint8_t *at
        cdef Py_ssize_t size
        if self.fd == -2:
            self.fd = self.connection.free_fd()
        if self.fd < 0:
            return False
        if self.count + spans + 1 > PIECES_MAX or self.noted + head_bytes > NOTES_BYTES:
            self.push(late)
            if self.fd < 0 or spans + 1 > PIECES_MAX:
                self.fd = -1
                return False
        self._note(head, head_bytes)
        for number in range(spans):
            at = choice.data + choice.spans[number].at
            size = choice.spans[number].size
            if size < PIECE_BYTES_MIN and self.noted + size <= NOTES_BYTES:
                self._note(at, size)
            else:
                self.pieces[self.count].iov_base = <void *>at
                self.pieces[self.count].iov_len = size
                self.count += 1
                self.waiting_bytes += size
        return True

    cdef void _note(self, const uint8_t *at, Py_ssize_t size) noexcept:
        cdef uint8_t *to = self.notes + self.noted
        cdef iovec *last = self.pieces + self.count - 1
        memcpy(to, at, size)
        self.noted += size
        self.waiting_bytes += size
        if self.count and <uint8_t *>last.iov_base + last.iov_len == to:
            last.iov_len += size
        else:
            last[1].iov_base = to
            last[1].iov_len = size
            self.count += 1

    cdef int push(self, list late) except -1:
        """Have the kernel take what it takes at once."""
        cdef Py_ssize_t sent, left, number, size
        cdef int fd = self.fd
        cdef bytes rest
        cdef uint8_t *to
        if self.count == 0:
            return 0
        sent = send_pieces(fd, self.pieces, self.count)
        if sent:
            self.connection.wrote(sent)
        left = self.waiting_bytes - sent
        if left:
            self.fd = -1
            try:
                rest = PyBytes_FromStringAndSize(NULL, left)
            except MemoryError:
                cut(fd)  # nothing may follow half a reply
                raise
            to = <uint8_t *>PyBytes_AS_STRING(rest)
            for number in range(self.count):
                size = self.pieces[number].iov_len
                if sent >= size:
                    sent -= size
                    continue
                to = _put(to, <uint8_t *>self.pieces[number].iov_base + sent, size - sent)
                sent = 0
            late.append(rest)
        self.count = self.noted = self.waiting_bytes = 0
        return 0
