#include "units.h"
#define SIDE 3
