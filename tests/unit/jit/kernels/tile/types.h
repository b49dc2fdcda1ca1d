#pragma once
#include "tile/add.h"  // a circle, which #pragma once ends
using f32 = float;
