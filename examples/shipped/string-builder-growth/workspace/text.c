#include "text.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

void text_init(Text *text)
{
    text->room = 16;
    text->length = 0;
    text->data = calloc(1, text->room);
}

void text_free(Text *text)
{
    free(text->data);
}

void text_append(Text *text, const char *piece)
{
    size_t count = strlen(piece);
    if (text->length + count > text->room) {
        text->room *= 2;
        text->data = realloc(text->data, text->room);
    }
    strcpy(text->data + text->length, piece);
    text->length += count;
}

void text_printf(Text *text, const char *format, ...)
{
    char buffer[64];
    va_list values;
    va_start(values, format);
    vsnprintf(buffer, sizeof buffer, format, values);
    va_end(values);
    text_append(text, buffer);
}

size_t text_replace(Text *text, const char *pattern, const char *by)
{
    size_t replaced = 0;
    char *at;
    while ((at = strstr(text->data, pattern))) {
        memcpy(at, by, strlen(by));
        replaced++;
    }
    return replaced;
}
