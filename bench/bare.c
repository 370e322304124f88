/* The least that any server does for a send: wait, receive, write the bytes to a file, answer.

   bare PORT FILE

   One thread, no checks, no memory that grows; frames are expected whole. What a broker takes
   beyond this is its own; what this takes is the kernel's, in whatever language a broker is. */
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

#define FILE_BYTES (1 << 28)

static char in[1 << 20], out[1 << 20];
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

/* Answers the whole frames of what came in; how many bytes of `out` that are. */
static int answer_all(int size) {
    int from = 0, to = 0;
    while (size - from >= 8 && (int)number(in + from) + 4 <= size - from && to < (1 << 20) - 512) {
        int length = (int)number(in + from);
        char *found = memmem(in + from + 8, length - 4, "\"opaque\":", 9);
        long opaque = found ? atol(found + 9) : 0;
        int header = sprintf(out + to + 8, answer, opaque);
        put_number(out + to, header + 4);
        put_number(out + to + 4, header);
        to += header + 8;
        from += length + 4;
    }
    return to;
}

int main(int count, char **words) {
    if (count != 3)
        return fprintf(stderr, "bare PORT FILE\n"), 2;
    int on = 1, listening = socket(AF_INET, SOCK_STREAM, 0);
    int file = open(words[2], O_CREAT | O_RDWR, 0600);
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_port = htons(atoi(words[1]))};
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    setsockopt(listening, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
    if (file < 0 || bind(listening, (struct sockaddr *)&address, sizeof address) != 0 ||
        listen(listening, 64) != 0)
        return perror("bare"), 1;
    int waiting = epoll_create1(0);
    struct epoll_event event = {.events = EPOLLIN, .data.fd = listening}, events[64];
    epoll_ctl(waiting, EPOLL_CTL_ADD, listening, &event);
    for (off_t at = 0;;) {
        int ready = epoll_wait(waiting, events, 64, -1);
        for (int which = 0; which < ready; which++) {
            int from = events[which].data.fd;
            if (from == listening) {
                event.data.fd = accept(listening, NULL, NULL);
                setsockopt(event.data.fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
                epoll_ctl(waiting, EPOLL_CTL_ADD, event.data.fd, &event);
                continue;
            }
            int size = recv(from, in, sizeof in, 0);
            if (size <= 0) {
                close(from);
                continue;
            }
            if (pwrite(file, in, size, at) != size)
                return perror("bare"), 1;
            at = (at + size) % FILE_BYTES;
            size = answer_all(size);
            if (send(from, out, size, MSG_NOSIGNAL) != size)
                close(from);
        }
    }
}
