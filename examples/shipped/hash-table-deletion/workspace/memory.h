#ifndef MEMORY_H
#define MEMORY_H

#include <stddef.h>

/* Zeroed memory; never NULL. */
void *table_malloc(size_t size);
void table_free_memory(void *memory);

#endif
