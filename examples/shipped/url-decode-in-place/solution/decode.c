#include "decode.h"

static int digit(char c)
{
    if (c >= '0' && c <= '9')
        return c - '0';
    if (c >= 'a' && c <= 'f')
        return c - 'a' + 10;
    if (c >= 'A' && c <= 'F')
        return c - 'A' + 10;
    return -1;
}

size_t url_decode(char *text)
{
    char *out = text;
    int query = 0;
    for (char *in = text; *in; in++) {
        int high = *in == '%' ? digit(in[1]) : -1;
        int low = high >= 0 ? digit(in[2]) : -1;
        if (low >= 0 && high + low > 0) {
            *out++ = (char)(high * 16 + low);
            in += 2;
        } else if (*in == '+' && query) {
            *out++ = ' ';
        } else {
            query |= *in == '?';
            *out++ = *in;
        }
    }
    *out = '\0';
    return (size_t)(out - text);
}
