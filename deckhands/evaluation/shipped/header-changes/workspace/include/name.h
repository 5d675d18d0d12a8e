#define NAME "square"
