#include "decode.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static int failed;

static void same(const char *from, const char *to)
{
    size_t size = strlen(from) + 1;
    char *text = malloc(size + 8);
    memcpy(text, from, size);
    memcpy(text + size, "41zzzzz", 8); /* what must not be read */
    size_t length = url_decode(text);
    if (strcmp(text, to) != 0 || length != strlen(to)) {
        printf("%s: not decoded properly\n", from);
        failed = 1;
    }
    if (memcmp(text + size, "41zzzzz", 8) != 0)
        failed = 1;
    free(text);
}

int main(void)
{
    same("", "");
    same("%41%5a", "AZ");
    same("%c3%A9", "\xc3\xa9");
    same("%ff", "\xff");
    same("100%", "100%");
    same("a%4", "a%4");
    same("%zz%4g%g4", "%zz%4g%g4");
    same("%%41", "%A");
    same("%4%41", "%4A");
    same("%2541", "%41");
    same("a+b?c+d?e+f", "a+b?c d?e f");
    same("a%3fb+c", "a?b+c");
    same("?%2b+", "?+ ");
    same("a%00b", "a%00b");
    same("%0", "%0");
    same("%:0%/9%@a%`a", "%:0%/9%@a%`a");
    return failed;
}
