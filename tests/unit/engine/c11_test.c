/* The C interface from C11, through the shared library: the headers compile alone, and a call from C works. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tandem/context_parallel.h"
#include "tandem/tandem.h"

static int failures = 0;

static void expect(int holds, const char* what) {
  if (holds) return;
  ++failures;
  fprintf(stderr, "failed: %s (last error: %s)\n", what, tandem_last_error());
}

int main(void) {
  /* Two keys of equal score: the mean of their values; lse = log 2. */
  float q[2] = {0, 0}, k[4] = {1, 2, 3, 4}, v[4] = {2, 4, 6, 10}, out[2] = {-1, -1}, lse[1] = {-1};
  int64_t shape_q[4] = {1, 1, 1, 2}, shape_k[4] = {1, 2, 1, 2}, shape_lse[3] = {1, 1, 1};
  const tandem_dtype f32 = {TANDEM_FLOAT, 32, 1};
  const tandem_device cpu = {TANDEM_CPU, 0};
  const tandem_tensor tq = {q, cpu, 4, f32, shape_q, NULL, 0}, tk = {k, cpu, 4, f32, shape_k, NULL, 0};
  const tandem_tensor tv = {v, cpu, 4, f32, shape_k, NULL, 0}, tout = {out, cpu, 4, f32, shape_q, NULL, 0};
  const tandem_tensor tlse = {lse, cpu, 3, f32, shape_lse, NULL, 0};
  tandem_attention_args args;
  memset(&args, 0, sizeof args);
  args.size = sizeof args;
  args.q = &tq;
  args.k = &tk;
  args.v = &tv;
  args.out = &tout;
  args.lse = &tlse;

  size_t bytes = 0;
  expect(tandem_workspace_size(NULL, TANDEM_FORWARD, &args, &bytes) == TANDEM_OK, "workspace_size");
  void* const workspace = malloc(bytes + 1); /* the size grows with the number of threads */
  expect(tandem_forward(NULL, &args, workspace, bytes, NULL) == TANDEM_OK, "forward");
  free(workspace);
  expect(out[0] == 4 && out[1] == 7, "the mean of the values");
  expect(fabs(lse[0] - log(2.0)) < 1e-6, "the logarithm of two");

  /* C may put any integer into an enum. */
  expect(tandem_check(NULL, (tandem_pass)7, &args) == TANDEM_INVALID_ARGUMENT, "a pass that is none");
  expect(strstr(tandem_last_error(), "pass (7)") != NULL, "its sentence");
  expect(strcmp(tandem_status_name(TANDEM_UNSUPPORTED), "unsupported") == 0, "the name of a status");

  const int64_t lengths[2] = {5, 1};
  tandem_cp_plan_args plan_args;
  memset(&plan_args, 0, sizeof plan_args);
  plan_args.size = sizeof plan_args;
  plan_args.ranks = 2;
  plan_args.documents = 2;
  plan_args.q_lens = lengths;
  tandem_cp_plan* plan = NULL;
  int64_t rows[2] = {0, 0};
  expect(tandem_cp_plan_create(&plan_args, &plan) == TANDEM_OK, "a plan of two ranks");
  expect(tandem_cp_plan_rows(plan, 0, &rows[0], NULL) == TANDEM_OK, "the rows of rank 0");
  expect(tandem_cp_plan_rows(plan, 1, &rows[1], NULL) == TANDEM_OK, "the rows of rank 1");
  expect(rows[0] + rows[1] == 6, "all rows have a rank");
  expect(tandem_cp_plan_rows(plan, 2, rows, NULL) == TANDEM_INVALID_ARGUMENT, "a rank beyond the group");
  tandem_cp_plan_destroy(plan);
  return failures != 0;
}
