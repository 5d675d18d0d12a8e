#define PER_METRE 100
int centimetres(int metres);
