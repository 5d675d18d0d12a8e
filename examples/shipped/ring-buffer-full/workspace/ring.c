#include "ring.h"

#include <stdlib.h>

int ring_init(Ring *ring, size_t capacity)
{
    ring->data = malloc(capacity);
    ring->capacity = capacity;
    ring->head = ring->tail = 0;
    return ring->data ? 0 : -1;
}

void ring_free(Ring *ring)
{
    free(ring->data);
    ring->data = NULL;
}

size_t ring_used(const Ring *ring)
{
    return (ring->tail + ring->capacity - ring->head) % ring->capacity;
}

size_t ring_write(Ring *ring, const unsigned char *bytes, size_t count)
{
    for (size_t i = 0; i < count; i++) {
        ring->data[ring->tail] = bytes[i];
        ring->tail = (ring->tail + 1) % ring->capacity;
    }
    return count;
}

size_t ring_read(Ring *ring, unsigned char *bytes, size_t count)
{
    for (size_t i = 0; i < count; i++) {
        bytes[i] = ring->data[ring->head];
        ring->head = (ring->head + 1) % ring->capacity;
    }
    return count;
}

size_t ring_peek(Ring *ring, unsigned char *bytes, size_t count)
{
    return ring_read(ring, bytes, count);
}
