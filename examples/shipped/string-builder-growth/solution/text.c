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
    if (!text->data)
        abort();
}

void text_free(Text *text)
{
    static char nothing[1];
    if (text->room > 1)
        free(text->data);
    text->data = nothing;
    text->length = 0;
    text->room = 1;
}

static void append(Text *text, const char *piece, size_t count)
{
    if (text->length + count >= text->room) {
        size_t room = text->room;
        while (room <= text->length + count)
            room *= 2;
        char *data = malloc(room);
        if (!data)
            abort();
        memcpy(data, text->data, text->length);
        memcpy(data + text->length, piece, count); /* perhaps a part of the old data */
        if (text->room > 1)
            free(text->data);
        text->data = data;
        text->room = room;
    } else {
        memmove(text->data + text->length, piece, count);
    }
    text->length += count;
    text->data[text->length] = '\0';
}

void text_append(Text *text, const char *piece)
{
    append(text, piece, strlen(piece));
}

void text_printf(Text *text, const char *format, ...)
{
    va_list values;
    va_start(values, format);
    int count = vsnprintf(NULL, 0, format, values);
    va_end(values);
    if (count < 0)
        abort();
    char *buffer = malloc((size_t)count + 1);
    if (!buffer)
        abort();
    va_start(values, format);
    vsnprintf(buffer, (size_t)count + 1, format, values);
    va_end(values);
    append(text, buffer, (size_t)count);
    free(buffer);
}

size_t text_replace(Text *text, const char *pattern, const char *by)
{
    size_t replaced = 0;
    size_t width = strlen(pattern);
    if (width == 0)
        return 0;
    Text result;
    text_init(&result);
    const char *rest = text->data;
    for (const char *at; (at = strstr(rest, pattern)); rest = at + width) {
        append(&result, rest, (size_t)(at - rest));
        text_append(&result, by);
        replaced++;
    }
    text_append(&result, rest);
    text_free(text);
    *text = result;
    return replaced;
}
