/* The cost of the calls in C, without a binding. */
#define _POSIX_C_SOURCE 199309L
#include <stdlib.h>
#include <time.h>

#include "call.h"

/* Returns nanoseconds per call, for one query and one key of 8 numbers. backward: the forward with its LSE, then the
 * backward. -1: a call has failed. */
TANDEM_API double boundary_nanoseconds(int calls, int backward) {
  float data[9][8] = {{0}};
  int64_t shape[4] = {1, 1, 1, 8}, strides[4] = {8, 8, 8, 1};
  tandem_tensor t[9]; /* q, k, v, out, lse, dout, dq, dk, dv */
  for (int i = 0; i < 9; ++i)
    t[i] = (tandem_tensor){data[i], {TANDEM_CPU, 0}, 4, {TANDEM_FLOAT, 32, 1}, shape, strides, 0};
  t[4].ndim = 3;
  tandem_attention_args both = {.size = sizeof both, .q = &t[0], .k = &t[1], .v = &t[2], .out = &t[3], .lse = &t[4]};
  tandem_attention_args second = both;
  second.dout = &t[5], second.dq = &t[6], second.dk = &t[7], second.dv = &t[8];
  size_t bytes = 0;
  int failed = tandem_workspace_size(NULL, TANDEM_BACKWARD, &second, &bytes);
  void* workspace = malloc(bytes); /* the forward pass needs less */
  struct timespec start, end;
  clock_gettime(CLOCK_MONOTONIC, &start);
  for (int i = 0; i < calls; ++i) {
    if (!backward) {
      failed |= boundary_call(&t[0], &t[1], &t[2], &t[3], 0, 0, 0, -1, -1);
    } else {
      failed |= tandem_forward(NULL, &both, workspace, bytes, NULL);
      failed |= tandem_backward(NULL, &second, workspace, bytes, NULL);
    }
  }
  clock_gettime(CLOCK_MONOTONIC, &end);
  free(workspace);
  return failed ? -1 : ((double)(end.tv_sec - start.tv_sec) * 1e9 + (double)(end.tv_nsec - start.tv_nsec)) / calls;
}
