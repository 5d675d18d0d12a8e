#include "memory.h"
#include "table.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define CHECK(x) do { if (!(x)) { printf("line %d: %s\n", __LINE__, #x); exit(1); } } while (0)

static long blocks;

void *table_malloc(size_t size)
{
    blocks++;
    return calloc(1, size ? size : 1);
}

void table_free_memory(void *memory)
{
    if (memory)
        blocks--;
    free(memory);
}

static int seen[200];

static void visit(Table *table, const char *key, long value, void *context)
{
    seen[value]++;
    if (value % *(int *)context == 0) {
        char copy[32];
        strcpy(copy, key);
        CHECK(table_remove(table, copy) == 1);
    }
}

int main(void)
{
    Table table;
    char key[32];
    long value;
    table_init(&table);

    /* compared with a plain array; the key buffer is used again and again */
    static long model[300];
    unsigned random = 12345;
    for (int round = 0; round < 60000; round++) {
        random = random * 1103515245u + 12345u;
        unsigned n = (random >> 16) % 300;
        sprintf(key, "key %u", n);
        switch ((random >> 8) % 3) {
        case 0:
            CHECK(table_put(&table, key, round + 1) == (model[n] == 0));
            model[n] = round + 1;
            break;
        case 1:
            CHECK(table_remove(&table, key) == (model[n] != 0));
            model[n] = 0;
            break;
        default:
            CHECK(table_get(&table, key, &value) == (model[n] != 0));
            CHECK(model[n] == 0 || value == model[n]);
        }
        if (round % 1000 == 0) {
            size_t count = 0;
            for (int i = 0; i < 300; i++)
                count += model[i] != 0;
            CHECK(table_count(&table) == count);
        }
    }
    table_free(&table);
    CHECK(blocks == 0);

    /* few keys at once, many over time */
    table_init(&table);
    for (int i = 0; i < 100000; i++) {
        sprintf(key, "%d", i);
        CHECK(table_put(&table, key, i) == 1);
        if (i >= 10) {
            sprintf(key, "%d", i - 10);
            CHECK(table_remove(&table, key) == 1);
            CHECK(!table_get(&table, key, &value));
        }
    }
    CHECK(table_count(&table) == 10 && blocks < 100);
    table_free(&table);
    CHECK(blocks == 0);

    /* odd keys */
    table_init(&table);
    CHECK(table_put(&table, "", 5) == 1 && table_put(&table, "\xff\xfe\xff\xff\xff\xff\xff\xff", 6) == 1);
    CHECK(table_put(&table, "\xc3\xa9", 7) == 1 && table_put(&table, "", 8) == 0);
    CHECK(table_get(&table, "", &value) && value == 8);
    CHECK(table_get(&table, "\xff\xfe\xff\xff\xff\xff\xff\xff", &value) && value == 6);
    CHECK(table_remove(&table, "") == 1 && table_remove(&table, "") == 0 && table_count(&table) == 2);
    table_free(&table);
    CHECK(blocks == 0);

    /* removal while visiting */
    for (int every = 1; every < 6; every++) {
        table_init(&table);
        for (int i = 0; i < 200; i++) {
            sprintf(key, "v%d", i);
            table_put(&table, key, i);
        }
        memset(seen, 0, sizeof seen);
        table_each(&table, visit, &every);
        for (int i = 0; i < 200; i++) {
            CHECK(seen[i] == 1);
            sprintf(key, "v%d", i);
            CHECK(table_get(&table, key, &value) == (i % every != 0));
        }
        table_free(&table);
        CHECK(blocks == 0);
    }
    puts("ok");
    return 0;
}
