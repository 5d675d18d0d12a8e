#include "text.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define CHECK(x) do { if (!(x)) { printf("line %d: %s\n", __LINE__, #x); exit(1); } } while (0)

static void is(const Text *text, const char *expected)
{
    if (strcmp(text->data, expected) != 0 || text->length != strlen(expected)) {
        printf("expected %.60s\n", expected);
        exit(1);
    }
}

int main(void)
{
    Text text;
    char big[5000];
    memset(big, 'x', sizeof big);
    big[4999] = '\0';

    text_init(&text);
    is(&text, "");
    text_append(&text, "");
    is(&text, "");
    text_append(&text, "0123456789abcdef");
    is(&text, "0123456789abcdef");
    text_append(&text, big);
    CHECK(text.length == 16 + 4999 && strlen(text.data) == text.length);
    text_free(&text);
    text_free(&text);
    text_append(&text, "again");
    is(&text, "again");
    for (int i = 0; i < 8; i++)
        text_append(&text, text.data);
    CHECK(text.length == 5 * 256 && strlen(text.data) == text.length);
    CHECK(memcmp(text.data + 5 * 255, "again", 5) == 0);
    text_free(&text);
    text_append(&text, "abc");
    for (int i = 0; i < 10; i++)
        text_append(&text, text.data + text.length - 2);
    is(&text, "abcbcbcbcbcbcbcbcbcbcbc");
    text_free(&text);

    text_printf(&text, "%s|%d", big, 42);
    CHECK(text.length == 5002 && strcmp(text.data + 4999, "|42") == 0);
    text_free(&text);
    text_printf(&text, "%s", "ab");
    text_printf(&text, "[%s]", text.data);
    is(&text, "ab[ab]");
    text_free(&text);

    text_append(&text, "banana");
    CHECK(text_replace(&text, "a", "aa") == 3);
    is(&text, "baanaanaa");
    CHECK(text_replace(&text, "aa", "") == 3);
    is(&text, "bnn");
    CHECK(text_replace(&text, "", "x") == 0);
    is(&text, "bnn");
    CHECK(text_replace(&text, "n", big) == 2);
    CHECK(text.length == 1 + 2 * 4999 && strlen(text.data) == text.length);
    text_free(&text);
    text_append(&text, "aaaa");
    CHECK(text_replace(&text, "aaa", "b") == 1);
    is(&text, "ba");
    CHECK(text_replace(&text, "zz", "b") == 0);
    text_free(&text);
    CHECK(text_replace(&text, "a", "b") == 0);
    is(&text, "");
    text_free(&text);
    puts("ok");
    return 0;
}
