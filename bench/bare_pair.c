/* The least that a master and its slave do for sends: receive, write, send on, sync, report, answer.

   bare_pair PORT FILE SYNC                   a slave: writes what comes, reports how much it has
   bare_pair PORT FILE SYNC SLAVE_PORT WAIT   its master; with WAIT=1 it answers when the slave has it

   With SYNC=1 a file is synced before anything is said about it. One thread each, no checks, no
   queues, no index. What is ready when a turn begins is one group: one write, one sync, one
   report. What a pair of brokers takes beyond this is its own; what this takes is the kernel's. */
#include <arpa/inet.h>
#include <fcntl.h>
#include <netinet/tcp.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>

#define FILE_BYTES (64 << 20) /* written again and again */
#define CONNECTIONS 64
#define IN_BYTES (1 << 20)

struct peer {
    int socket;
    long held; /* bytes of frames that are not answered yet */
    char in[IN_BYTES];
};

static struct peer peers[CONNECTIONS];
static char group[8 << 20], out[1 << 20];
static const char answer[] =
    "{\"code\":0,\"flag\":1,\"language\":\"OTHER\",\"opaque\":%ld,\"version\":0,\"extFields\":"
    "{\"msgId\":\"7F00000100002A9F0000000000000000\",\"queueId\":\"0\",\"queueOffset\":\"0\"}}";

static uint32_t number(const char *at) {
    uint32_t value;
    memcpy(&value, at, 4);
    return ntohl(value);
}

static void put_number(char *at, uint32_t value) {
    value = htonl(value);
    memcpy(at, &value, 4);
}

static void fail(const char *what) {
    perror(what);
    exit(1);
}

static int quick(int socket) {
    int on = 1;
    if (socket < 0)
        fail("bare_pair");
    setsockopt(socket, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
    return socket;
}

/* Of the bytes that came in, those of whole frames. */
static long whole(const struct peer *peer) {
    long at = 0;
    while (peer->held - at >= 8 && (long)number(peer->in + at) + 4 <= peer->held - at)
        at += number(peer->in + at) + 4;
    return at;
}

static void answer_all(struct peer *peer, long size) {
    long to = 0;
    for (long from = 0; from < size; from += number(peer->in + from) + 4) {
        char *found = memmem(peer->in + from + 8, number(peer->in + from) - 4, "\"opaque\":", 9);
        int header = sprintf(out + to + 8, answer, found ? atol(found + 9) : 0);
        put_number(out + to, header + 4);
        put_number(out + to + 4, header);
        to += header + 8;
    }
    if (send(peer->socket, out, to, MSG_NOSIGNAL) != to)
        close(peer->socket);
    memmove(peer->in, peer->in + size, peer->held - size);
    peer->held -= size;
}

/* The data is in the file, and on the disk when it has to be. */
static void keep(int file, const char *data, long size, int sync) {
    static off_t at;
    if (at + size > FILE_BYTES)
        at = 0;
    if (pwrite(file, data, size, at) != size)
        fail("pwrite");
    at += size;
    if (sync && fdatasync(file) != 0)
        fail("fdatasync");
}

/* Blocks that were never written make a sync dearer. */
static void fill(int file) {
    for (long at = 0; at < FILE_BYTES; at += sizeof group)
        if (pwrite(file, group, sizeof group, at) != sizeof group)
            fail("pwrite");
    fsync(file);
}

static void follow(int listening, int file, int sync) {
    int master = quick(accept(listening, NULL, NULL));
    for (uint64_t end = 0;;) {
        long size = recv(master, group, sizeof group, 0);
        if (size <= 0)
            return;
        keep(file, group, size, sync);
        end += size;
        send(master, &end, sizeof end, MSG_NOSIGNAL);
    }
}

/* Everything that was ready: written, sent on, synced, reported, and then answered. */
static void take(struct peer **ready, int count, int file, int sync, int slave, int wait) {
    static uint64_t end, reported;
    long sizes[CONNECTIONS], size = 0;
    for (int which = 0; which < count; which++) {
        sizes[which] = whole(ready[which]);
        memcpy(group + size, ready[which]->in, sizes[which]);
        size += sizes[which];
    }
    if (!size)
        return;
    for (long sent = 0, part; sent < size; sent += part)
        if ((part = send(slave, group + sent, size - sent, MSG_NOSIGNAL)) < 0)
            fail("send");
    end += size;
    keep(file, group, size, sync);
    while (wait && reported < end)
        if (recv(slave, &reported, sizeof reported, MSG_WAITALL) != sizeof reported)
            fail("recv");
    if (!wait)
        while (recv(slave, out, sizeof out, MSG_DONTWAIT) > 0) {
        }
    for (int which = 0; which < count; which++)
        if (sizes[which])
            answer_all(ready[which], sizes[which]);
}

static void lead(int listening, int file, int sync, int slave, int wait) {
    int waiting = epoll_create1(0);
    struct epoll_event event = {.events = EPOLLIN, .data.ptr = NULL}, events[CONNECTIONS];
    epoll_ctl(waiting, EPOLL_CTL_ADD, listening, &event);
    for (int made = 0;;) {
        int count = 0, found = epoll_wait(waiting, events, CONNECTIONS, -1);
        struct peer *ready[CONNECTIONS];
        for (int which = 0; which < found; which++) {
            struct peer *peer = events[which].data.ptr;
            if (peer == NULL) {
                peer = event.data.ptr = &peers[made++ % CONNECTIONS]; /* older ones are closed */
                peer->held = 0;
                peer->socket = quick(accept(listening, NULL, NULL));
                epoll_ctl(waiting, EPOLL_CTL_ADD, peer->socket, &event);
                continue;
            }
            long size = recv(peer->socket, peer->in + peer->held, IN_BYTES - peer->held, 0);
            if (size <= 0) {
                close(peer->socket);
                continue;
            }
            peer->held += size;
            ready[count++] = peer;
        }
        take(ready, count, file, sync, slave, wait);
    }
}

int main(int count, char **words) {
    if (count != 4 && count != 6)
        return fprintf(stderr, "bare_pair PORT FILE SYNC [SLAVE_PORT WAIT]\n"), 2;
    int on = 1;
    int listening = socket(AF_INET, SOCK_STREAM, 0), slave = socket(AF_INET, SOCK_STREAM, 0);
    int file = open(words[2], O_CREAT | O_RDWR, 0600), sync = atoi(words[3]);
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_port = htons(atoi(words[1]))};
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    setsockopt(listening, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
    if (file < 0)
        fail(words[2]);
    fill(file);
    if (bind(listening, (struct sockaddr *)&address, sizeof address) != 0 ||
        listen(listening, CONNECTIONS) != 0)
        fail("bare_pair");
    if (count == 4) {
        follow(listening, file, sync);
        return 0;
    }
    address.sin_port = htons(atoi(words[4]));
    for (int tries = 0; connect(slave, (struct sockaddr *)&address, sizeof address) != 0; tries++)
        if (tries == 1000 || usleep(10000) != 0)
            fail("connect");
    lead(listening, file, sync, quick(slave), atoi(words[5]));
}
