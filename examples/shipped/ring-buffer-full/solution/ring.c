#include "ring.h"

#include <stdlib.h>

int ring_init(Ring *ring, size_t capacity)
{
    ring->data = malloc(capacity);
    ring->capacity = capacity;
    ring->head = ring->used = 0;
    return ring->data ? 0 : -1;
}

void ring_free(Ring *ring)
{
    free(ring->data);
    ring->data = NULL;
}

size_t ring_used(const Ring *ring)
{
    return ring->used;
}

size_t ring_write(Ring *ring, const unsigned char *bytes, size_t count)
{
    size_t room = ring->capacity - ring->used;
    if (count > room)
        count = room;
    for (size_t i = 0; i < count; i++)
        ring->data[(ring->head + ring->used++) % ring->capacity] = bytes[i];
    return count;
}

size_t ring_read(Ring *ring, unsigned char *bytes, size_t count)
{
    count = ring_peek(ring, bytes, count);
    if (count) {
        ring->head = (ring->head + count) % ring->capacity;
        ring->used -= count;
    }
    return count;
}

size_t ring_peek(Ring *ring, unsigned char *bytes, size_t count)
{
    if (count > ring->used)
        count = ring->used;
    for (size_t i = 0; i < count; i++)
        bytes[i] = ring->data[(ring->head + i) % ring->capacity];
    return count;
}
