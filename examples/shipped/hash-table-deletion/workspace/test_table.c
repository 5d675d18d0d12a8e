#include "table.h"

#include <assert.h>
#include <stdio.h>

int main(void)
{
    Table table;
    long value = 0;
    table_init(&table);
    assert(table_put(&table, "one", 1) == 1);
    assert(table_get(&table, "one", &value) && value == 1);
    assert(!table_get(&table, "two", &value));
    table_free(&table);
    puts("ok");
    return 0;
}
