#include "tile/add.h"
  #  include "tile/types.h"
// #include "tile/unused.h"
extern "C" __global__ void add(f32* x) { x[threadIdx.x] = add_one(x[threadIdx.x]); }
