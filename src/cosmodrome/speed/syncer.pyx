# cython: language_level=3
"""A thread that syncs files and needs no GIL for it, so that nobody waits for anybody's turn.

It sleeps on a condition, calls `fdatasync` for the descriptors it was given, keeps the error
number and rings the bell: a descriptor (eventfd, or a pipe where there is none) that an event
loop watches. Only when a sync failed it takes the GIL, to call `failed` before it rings.

`SyncThread` and the thread itself share one `_Shared`. Whoever of the two leaves last frees it:
the former, or the thread when it was left alone in the middle of a sync. The pure twin is
`env.real.PythonSyncThread`.
"""

from cpython.ref cimport Py_DECREF, Py_INCREF, Py_XDECREF, PyObject
from libc.errno cimport EINTR, errno
from libc.stdlib cimport calloc, free, realloc

cdef extern from "<pthread.h>" nogil:
    ctypedef struct pthread_t:
        pass
    ctypedef struct pthread_mutex_t:
        pass
    ctypedef struct pthread_cond_t:
        pass
    int pthread_mutex_init(pthread_mutex_t*, const void*)
    int pthread_mutex_lock(pthread_mutex_t*)
    int pthread_mutex_unlock(pthread_mutex_t*)
    int pthread_mutex_destroy(pthread_mutex_t*)
    int pthread_cond_init(pthread_cond_t*, const void*)
    int pthread_cond_wait(pthread_cond_t*, pthread_mutex_t*)
    int pthread_cond_signal(pthread_cond_t*)
    int pthread_cond_destroy(pthread_cond_t*)
    int pthread_join(pthread_t, void**)
    int pthread_detach(pthread_t)

cdef extern from "<unistd.h>" nogil:
    int close_descriptor "close"(int)
    int getpid()

cdef extern from "Python.h" nogil:
    int Py_IsInitialized()

cdef extern from *:
    """
    #include <errno.h>
    #include <fcntl.h>
    #include <pthread.h>
    #include <signal.h>
    #include <stdint.h>
    #include <unistd.h>
    #if defined(__linux__) && !defined(COSMO_BELL_IS_PIPE)
    #include <sys/eventfd.h>
    static int bell_open(int ends[2]) {
        ends[0] = ends[1] = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
        return ends[0] < 0 ? -1 : 0;
    }
    #else
    static int bell_open(int ends[2]) {
        int i;
        if (pipe(ends) < 0)
            return -1;
        for (i = 0; i < 2; i++) {
            fcntl(ends[i], F_SETFD, FD_CLOEXEC);
            fcntl(ends[i], F_SETFL, O_NONBLOCK);
        }
        return 0;
    }
    #endif

    /* Eight bytes suit both kinds; a pipe has only as many of them as were not heard yet. */
    static void bell_ring(int end) {
        uint64_t one = 1;
        while (write(end, &one, sizeof one) < 0 && errno == EINTR) {}
    }
    static void bell_hush(int end) {
        uint64_t count;
        while (read(end, &count, sizeof count) < 0 && errno == EINTR) {}
    }

    static int sync_data(int descriptor) {
    #if defined(__APPLE__)
        return fsync(descriptor);
    #else
        return fdatasync(descriptor);
    #endif
    }

    /* Signals are for the threads of Python: here they would only interrupt a sync. */
    static int start_thread(pthread_t *thread, void *(*run)(void *), void *shared) {
        sigset_t all, before;
        int error;
        sigfillset(&all);
        pthread_sigmask(SIG_SETMASK, &all, &before);
        error = pthread_create(thread, NULL, run, shared);
        pthread_sigmask(SIG_SETMASK, &before, NULL);
    #if defined(__linux__)
        if (!error)
            pthread_setname_np(*thread, "cosmo-sync");
    #endif
        return error;
    }
    """
    int bell_open(int* ends) nogil
    void bell_ring(int end) nogil
    void bell_hush(int end) nogil
    int sync_data(int descriptor) nogil
    int start_thread(pthread_t*, void* (*)(void*) noexcept nogil, void*) nogil


cdef enum:
    IDLE = 0
    GIVEN = 1  # the thread's turn
    ENDED = 2  # the bell was or is about to be rung


cdef struct _Shared:
    pthread_mutex_t lock  # for `state` and `left`; the rest belongs to whose turn it is
    pthread_cond_t work
    int state
    int left  # nobody comes back
    int* descriptors
    Py_ssize_t count
    Py_ssize_t room
    PyObject* failed  # a reference of its own
    int error
    int bell[2]


cdef void _free(_Shared* shared) noexcept nogil:
    close_descriptor(shared.bell[0])
    if shared.bell[1] != shared.bell[0]:
        close_descriptor(shared.bell[1])
    pthread_cond_destroy(&shared.work)
    pthread_mutex_destroy(&shared.lock)
    free(shared.descriptors)
    free(shared)


cdef void _tell_failed(PyObject* failed) noexcept with gil:
    (<object>failed)()  # what it raises is reported, as nobody is there to hear of it


cdef void _drop(PyObject* failed) noexcept with gil:
    Py_XDECREF(failed)


cdef int _sync(_Shared* shared) noexcept nogil:
    cdef Py_ssize_t at
    for at in range(shared.count):
        while sync_data(shared.descriptors[at]) < 0:
            if errno != EINTR:
                return errno
    return 0


cdef void* _run(void* shared_state) noexcept nogil:
    cdef _Shared* shared = <_Shared*>shared_state
    cdef int state, left
    while True:
        pthread_mutex_lock(&shared.lock)
        while shared.state != GIVEN and not shared.left:
            pthread_cond_wait(&shared.work, &shared.lock)
        state = shared.state
        pthread_mutex_unlock(&shared.lock)
        if state != GIVEN:
            return NULL  # `_leave` waits for this and frees
        shared.error = _sync(shared)
        # An interpreter that has ended gives no GIL to anybody.
        if shared.error and Py_IsInitialized():
            _tell_failed(shared.failed)
        pthread_mutex_lock(&shared.lock)
        shared.state = ENDED
        left = shared.left
        pthread_mutex_unlock(&shared.lock)
        if left:
            if Py_IsInitialized():
                _drop(shared.failed)
            _free(shared)
            return NULL
        bell_ring(shared.bell[1])


cdef void _leave(_Shared* shared, pthread_t thread) noexcept:
    cdef int state
    pthread_mutex_lock(&shared.lock)
    state = shared.state
    shared.left = 1
    pthread_mutex_unlock(&shared.lock)
    if state == GIVEN:
        pthread_detach(thread)
        return
    pthread_cond_signal(&shared.work)
    with nogil:
        pthread_join(thread, NULL)
    Py_XDECREF(shared.failed)
    _free(shared)


cdef class SyncThread:
    """One thread. `begin`, wait for the bell, `end`, and so on; `close` at last."""

    cdef _Shared* _shared
    cdef pthread_t _thread
    cdef int _process

    def __cinit__(self):
        cdef int error
        cdef _Shared* shared = <_Shared*>calloc(1, sizeof(_Shared))
        if shared is NULL:
            raise MemoryError
        if bell_open(shared.bell) < 0:
            error = errno
            free(shared)
            raise OSError(error, "no descriptor is left to hear of syncs")
        pthread_mutex_init(&shared.lock, NULL)
        pthread_cond_init(&shared.work, NULL)
        error = start_thread(&self._thread, _run, shared)
        if error:
            _free(shared)
            raise OSError(error, "no thread can be started to sync files")
        self._process = getpid()
        self._shared = shared

    @property
    def bell(self):
        """Readable when the sync under way has ended; -1 when closed."""
        return -1 if self._shared is NULL else self._shared.bell[0]

    def begin(self, descriptors, failed):
        """Sync these in order, up to the first that fails. They stay open until `end`."""
        cdef _Shared* shared = self._shared
        cdef Py_ssize_t count = len(descriptors)
        cdef Py_ssize_t at = 0
        cdef int* grown
        if shared is NULL or shared.failed is not NULL:
            raise RuntimeError("one sync at a time, and none after close")
        if count > shared.room:
            grown = <int*>realloc(shared.descriptors, count * sizeof(int))
            if grown is NULL:
                raise MemoryError
            shared.descriptors, shared.room = grown, count
        for at in range(count):
            shared.descriptors[at] = descriptors[at]
        shared.count = count
        Py_INCREF(failed)
        shared.failed = <PyObject*>failed
        pthread_mutex_lock(&shared.lock)
        shared.state = GIVEN
        pthread_mutex_unlock(&shared.lock)
        pthread_cond_signal(&shared.work)

    def end(self):
        """The error number, 0 when all is synced, or None while that is not known."""
        cdef _Shared* shared = self._shared
        cdef int state
        if shared is NULL:
            return None
        bell_hush(shared.bell[0])
        pthread_mutex_lock(&shared.lock)
        state = shared.state
        if state == ENDED:
            shared.state = IDLE
        pthread_mutex_unlock(&shared.lock)
        if state != ENDED:
            return None
        failed = <object>shared.failed
        Py_DECREF(failed)
        shared.failed = NULL
        return shared.error

    def close(self):
        """No thread and no descriptor are left. A sync under way goes on and takes them along."""
        cdef _Shared* shared = self._shared
        self._shared = NULL
        # A fork has a copy of the memory, but no thread to end.
        if shared is not NULL and self._process == getpid():
            _leave(shared, self._thread)

    def __dealloc__(self):
        if self._shared is not NULL and self._process == getpid():
            _leave(self._shared, self._thread)
