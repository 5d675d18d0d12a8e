#ifndef TEXT_H
#define TEXT_H

#include <stddef.h>

typedef struct {
    char *data; /* always ends with a zero byte */
    size_t length;
    size_t room;
} Text;

void text_init(Text *text);
void text_free(Text *text);
void text_append(Text *text, const char *piece);
void text_printf(Text *text, const char *format, ...);
size_t text_replace(Text *text, const char *pattern, const char *by);

#endif
