#include "shape.h"

#include <stdio.h>

int main(void)
{
    printf("%d\n", SIDE * centimetres(SIDE) * PER_METRE);
    return 0;
}
