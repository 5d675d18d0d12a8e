#include "decode.h"

#include <assert.h>
#include <stdio.h>
#include <string.h>

int main(void)
{
    char text[] = "/a%41%20b";
    assert(url_decode(text) == 5);
    assert(strcmp(text, "/aA b") == 0);
    puts("ok");
    return 0;
}
