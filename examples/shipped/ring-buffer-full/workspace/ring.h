#ifndef RING_H
#define RING_H

#include <stddef.h>

typedef struct {
    unsigned char *data;
    size_t capacity;
    size_t head; /* next to read */
    size_t tail; /* next to write */
} Ring;

int ring_init(Ring *ring, size_t capacity); /* 0, or -1 without memory */
void ring_free(Ring *ring);
size_t ring_used(const Ring *ring);
size_t ring_write(Ring *ring, const unsigned char *bytes, size_t count);
size_t ring_read(Ring *ring, unsigned char *bytes, size_t count);
size_t ring_peek(Ring *ring, unsigned char *bytes, size_t count);

#endif
