#ifndef DECODE_H
#define DECODE_H

#include <stddef.h>

/* Decode the text in place and return its new length. */
size_t url_decode(char *text);

#endif
