#include "table.h"

#include <string.h>

#include "memory.h"

static size_t hash(const char *key)
{
    size_t sum = 5381;
    for (; *key; key++)
        sum = sum * 33 + (unsigned char)*key;
    return sum ^ sum >> 15;
}

static void start(Table *table, size_t room)
{
    table->room = room;
    table->count = table->used = 0;
    table->slots = table_malloc(room * sizeof(Slot));
}

void table_init(Table *table)
{
    start(table, 8);
}

void table_free(Table *table)
{
    for (size_t i = 0; i < table->room; i++)
        table_free_memory(table->slots[i].key);
    table_free_memory(table->slots);
    table->slots = NULL;
    table->room = table->count = table->used = 0;
}

/* Return the slot of the key, or the free one where the search ends. */
static Slot *find(const Table *table, const char *key)
{
    size_t at = hash(key) & (table->room - 1);
    for (;; at = (at + 1) & (table->room - 1)) {
        Slot *slot = &table->slots[at];
        if (slot->key ? strcmp(slot->key, key) == 0 : !slot->removed)
            return slot;
    }
}

static void rebuild(Table *table)
{
    Table old = *table;
    start(table, old.count * 2 >= old.room ? old.room * 2 : old.room);
    for (size_t i = 0; i < old.room; i++) {
        if (old.slots[i].key) {
            *find(table, old.slots[i].key) = old.slots[i];
            table->count++;
        }
    }
    table->used = table->count;
    table_free_memory(old.slots);
}

int table_put(Table *table, const char *key, long value)
{
    Slot *slot = find(table, key);
    if (slot->key) {
        slot->value = value;
        return 0;
    }
    if ((table->used + 1) * 4 > table->room * 3) {
        rebuild(table);
        slot = find(table, key);
    }
    slot->key = table_malloc(strlen(key) + 1);
    strcpy(slot->key, key);
    slot->value = value;
    table->count++;
    table->used++;
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
    if (!slot->key)
        return 0;
    table_free_memory(slot->key);
    slot->key = NULL;
    slot->removed = 1;
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
