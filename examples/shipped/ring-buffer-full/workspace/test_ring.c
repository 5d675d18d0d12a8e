#include "ring.h"

#include <assert.h>
#include <stdio.h>

int main(void)
{
    Ring ring;
    unsigned char out[4];
    assert(ring_init(&ring, 8) == 0);
    assert(ring_write(&ring, (const unsigned char *)"abc", 3) == 3);
    assert(ring_used(&ring) == 3);
    assert(ring_read(&ring, out, 3) == 3);
    assert(out[0] == 'a' && out[2] == 'c');
    ring_free(&ring);
    puts("ok");
    return 0;
}
