#include "table.h"

#include <string.h>

#include "memory.h"

static size_t hash(const char *key)
{
    int sum = 0;
    for (; *key; key++)
        sum = sum * 31 + *key;
    return sum % 8;
}

void table_init(Table *table)
{
    table->room = 8;
    table->count = 0;
    table->slots = table_malloc(table->room * sizeof(Slot));
}

void table_free(Table *table)
{
    table->slots = NULL;
}

static Slot *find(const Table *table, const char *key)
{
    size_t at = hash(key);
    while (table->slots[at].key && strcmp(table->slots[at].key, key) != 0)
        at = (at + 1) & (table->room - 1);
    return &table->slots[at];
}

int table_put(Table *table, const char *key, long value)
{
    if (table->count == table->room) {
        Slot *old = table->slots;
        table->slots = table_malloc(2 * table->room * sizeof(Slot));
        memcpy(table->slots, old, table->room * sizeof(Slot));
        table->room *= 2;
    }
    Slot *slot = find(table, key);
    slot->key = key;
    slot->value = value;
    table->count++;
    return 1;
}

int table_get(const Table *table, const char *key, long *value)
{
    Slot *slot = find(table, key);
    if (slot->key)
        *value = slot->value;
    return slot->key != NULL;
}

int table_remove(Table *table, const char *key)
{
    Slot *slot = find(table, key);
    slot->key = NULL;
    table->count--;
    return 1;
}

size_t table_count(const Table *table)
{
    return table->count;
}

void table_each(Table *table, void (*visit)(Table *, const char *key, long value, void *context), void *context)
{
    for (size_t i = 0; i < table->room; i++)
        if (table->slots[i].key)
            visit(table, table->slots[i].key, table->slots[i].value, context);
}
