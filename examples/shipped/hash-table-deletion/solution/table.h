#ifndef TABLE_H
#define TABLE_H

#include <stddef.h>

typedef struct {
    char *key; /* NULL: free, or removed */
    long value;
    int removed;
} Slot;

typedef struct {
    Slot *slots;
    size_t room; /* a power of two */
    size_t count;
    size_t used; /* with the removed ones */
} Table;

void table_init(Table *table);
void table_free(Table *table);
int table_put(Table *table, const char *key, long value);
int table_get(const Table *table, const char *key, long *value);
int table_remove(Table *table, const char *key);
size_t table_count(const Table *table);
void table_each(Table *table, void (*visit)(Table *, const char *key, long value, void *context), void *context);

#endif
