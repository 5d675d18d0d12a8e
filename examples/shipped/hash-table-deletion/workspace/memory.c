#include "memory.h"

#include <stdlib.h>

void *table_malloc(size_t size)
{
    void *memory = calloc(1, size);
    if (!memory)
        abort();
    return memory;
}

void table_free_memory(void *memory)
{
    free(memory);
}
