#include "ring.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define CHECK(x) do { if (!(x)) { printf("line %d: %s\n", __LINE__, #x); exit(1); } } while (0)

static const unsigned char *text(const char *s) { return (const unsigned char *)s; }

int main(void)
{
    Ring ring;
    unsigned char out[32];
    CHECK(ring_init(&ring, 4) == 0);
    CHECK(ring_used(&ring) == 0);
    CHECK(ring_read(&ring, out, 3) == 0);
    CHECK(ring_write(&ring, text("abcd"), 4) == 4);
    CHECK(ring_used(&ring) == 4);
    CHECK(ring_write(&ring, text("e"), 1) == 0);
    CHECK(ring_peek(&ring, out, 2) == 2 && memcmp(out, "ab", 2) == 0);
    CHECK(ring_peek(&ring, out, 9) == 4 && memcmp(out, "abcd", 4) == 0);
    CHECK(ring_used(&ring) == 4);
    CHECK(ring_read(&ring, out, 3) == 3 && memcmp(out, "abc", 3) == 0);
    CHECK(ring_write(&ring, text("efghi"), 5) == 3);
    CHECK(ring_used(&ring) == 4);
    memset(out, '?', sizeof out);
    CHECK(ring_read(&ring, out, 32) == 4 && memcmp(out, "defg?", 5) == 0);
    CHECK(ring_used(&ring) == 0);
    ring_free(&ring);

    CHECK(ring_init(&ring, 1) == 0);
    for (int i = 0; i < 5; i++) {
        CHECK(ring_write(&ring, text("xy"), 2) == 1);
        CHECK(ring_used(&ring) == 1);
        CHECK(ring_read(&ring, out, 2) == 1 && out[0] == 'x');
    }
    ring_free(&ring);

    /* many wraps, compared with a counter */
    unsigned char next_in = 0, next_out = 0;
    CHECK(ring_init(&ring, 7) == 0);
    for (int i = 0; i < 1000; i++) {
        unsigned char in[5];
        size_t want = (size_t)(i * 3 % 6);
        if (want > 5) want = 5;
        for (size_t k = 0; k < want; k++) in[k] = (unsigned char)(next_in + k);
        next_in = (unsigned char)(next_in + ring_write(&ring, in, want));
        size_t got = ring_read(&ring, out, (size_t)(i * 7 % 5));
        for (size_t k = 0; k < got; k++) CHECK(out[k] == next_out++);
        CHECK(ring_used(&ring) == (size_t)(unsigned char)(next_in - next_out));
    }
    ring_free(&ring);
    puts("ok");
    return 0;
}
