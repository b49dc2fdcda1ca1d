// The first and the last kernels of a backward, on every architecture. The unit has no header of the main kernel, so
// that it compiles in less time and does not change with the main kernel.
#pragma once
#include "config/sm100_backward.h"
#include "config/sm90_backward.h"
#include "prepost/bwd_postprocess.cuh"
#include "prepost/bwd_preprocess.cuh"
#include "prepost/dsink.cuh"
