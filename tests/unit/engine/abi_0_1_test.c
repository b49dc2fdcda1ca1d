/* A program of version 0.1: compiled with that version's header, run with the current library. The struct of 0.1 is
 * shorter, and the library must not read beyond it. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <tandem/tandem.h>

_Static_assert(TANDEM_VERSION_MAJOR == 0 && TANDEM_VERSION_MINOR == 1, "the frozen header is the one that is included");
_Static_assert(sizeof(tandem_attention_args) == 288, "what version 0.1 had");

static int failures = 0;

static void expect(int holds, const char* what) {
  if (holds) return;
  ++failures;
  fprintf(stderr, "failed: %s (last error: %s)\n", what, tandem_last_error());
}

int main(void) {
  /* Two keys of equal score: out is the mean of their values, lse = log 2. Each value gets half of the gradient of out.
     The gradient of the scores is half the difference of the values. */
  float q[2] = {0, 0}, k[4] = {1, 2, 3, 4}, v[4] = {2, 4, 6, 10}, out[2] = {-1, -1}, lse[1] = {-1};
  float dout[2] = {1, 1}, dq[2] = {-1, -1}, dk[4] = {-1, -1, -1, -1}, dv[4] = {-1, -1, -1, -1};
  int64_t shape_q[4] = {1, 1, 1, 2}, shape_k[4] = {1, 2, 1, 2}, shape_lse[3] = {1, 1, 1};
  const tandem_dtype f32 = {TANDEM_FLOAT, 32, 1};
  const tandem_device cpu = {TANDEM_CPU, 0};
  const tandem_tensor tq = {q, cpu, 4, f32, shape_q, NULL, 0}, tk = {k, cpu, 4, f32, shape_k, NULL, 0};
  const tandem_tensor tv = {v, cpu, 4, f32, shape_k, NULL, 0}, tout = {out, cpu, 4, f32, shape_q, NULL, 0};
  const tandem_tensor tlse = {lse, cpu, 3, f32, shape_lse, NULL, 0}, tdout = {dout, cpu, 4, f32, shape_q, NULL, 0};
  const tandem_tensor tdq = {dq, cpu, 4, f32, shape_q, NULL, 0}, tdk = {dk, cpu, 4, f32, shape_k, NULL, 0};
  const tandem_tensor tdv = {dv, cpu, 4, f32, shape_k, NULL, 0};
  struct {
    tandem_attention_args args;
    unsigned char not_of_the_struct[256];
  } memory;
  memset(&memory, 0xff, sizeof memory);
  tandem_attention_args* const args = &memory.args;
  memset(args, 0, sizeof *args);
  args->size = sizeof *args;
  args->q = &tq;
  args->k = &tk;
  args->v = &tv;
  args->out = &tout;
  args->lse = &tlse;
  args->softmax_scale = 1;

  size_t bytes = 0;
  expect(tandem_check(NULL, TANDEM_FORWARD, args) == TANDEM_OK, "check");
  expect(tandem_workspace_size(NULL, TANDEM_FORWARD, args, &bytes) == TANDEM_OK, "workspace_size");
  expect(tandem_prepare(NULL, TANDEM_FORWARD, args) == TANDEM_OK, "prepare");
  void* workspace = malloc(bytes + 1); /* the size grows with the number of threads */
  expect(tandem_forward(NULL, args, workspace, bytes, NULL) == TANDEM_OK, "forward");
  free(workspace);
  expect(out[0] == 4 && out[1] == 7, "the mean of the values");
  expect(fabs(lse[0] - log(2.0)) < 1e-6, "the logarithm of two");

  args->dout = &tdout;
  args->dq = &tdq;
  args->dk = &tdk;
  args->dv = &tdv;
  expect(tandem_workspace_size(NULL, TANDEM_BACKWARD, args, &bytes) == TANDEM_OK, "workspace_size of backward");
  workspace = malloc(bytes + 1);
  expect(tandem_backward(NULL, args, workspace, bytes, NULL) == TANDEM_OK, "backward");
  free(workspace);
  for (int i = 0; i < 4; ++i) expect(fabsf(dv[i] - 0.5f) < 1e-6f, "half of dout for each value");
  /* dout . v is 6 and 16, their mean 11: gradients of the scores are -2.5 and 2.5, and k differs by (2, 2). */
  expect(fabsf(dq[0] - 5) < 1e-4f && fabsf(dq[1] - 5) < 1e-4f, "dq");
  for (int i = 0; i < 4; ++i) expect(dk[i] == 0, "dk of a query of zeros");

  for (size_t i = 0; i < sizeof memory.not_of_the_struct; ++i)
    expect(memory.not_of_the_struct[i] == 0xff, "what lies behind the struct is as it was");
  args->size = sizeof *args - 8;
  expect(tandem_check(NULL, TANDEM_FORWARD, args) == TANDEM_INVALID_ARGUMENT, "a struct older than the first");
  return failures != 0;
}
