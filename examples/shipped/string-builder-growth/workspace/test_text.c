#include "text.h"

#include <assert.h>
#include <stdio.h>
#include <string.h>

int main(void)
{
    Text text;
    text_init(&text);
    text_append(&text, "hello");
    text_printf(&text, " %d", 5);
    assert(strcmp(text.data, "hello 5") == 0);
    assert(text_replace(&text, "hello", "HELLO") == 1);
    text_free(&text);
    puts("ok");
    return 0;
}
