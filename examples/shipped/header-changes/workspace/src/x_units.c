#include "units.h"

int centimetres(int metres)
{
    return metres * PER_METRE;
}
