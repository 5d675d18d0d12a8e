#include "decode.h"

static int digit(char c)
{
    if (c >= '0' && c <= '9')
        return c - '0';
    return c - 'A' + 10;
}

size_t url_decode(char *text)
{
    char *out = text;
    for (char *in = text; *in; in++) {
        if (*in == '%') {
            *out++ = (char)(digit(in[1]) * 16 + digit(in[2]));
            in += 2;
        } else {
            *out++ = *in;
        }
    }
    *out = '\0';
    return (size_t)(out - text);
}
