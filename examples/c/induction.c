/* One attention head that continues a text that it has seen before (an "induction head"), in C.
 *
 * Query i encodes the last two characters, key j the two characters before j, and value j character j. Causal attention
 * therefore finds the earlier position with the same two characters and copies the character that followed.
 *
 * Build it from any folder:
 *   cmake -S examples/c -B /tmp/example && cmake --build /tmp/example       (CMAKE_PREFIX_PATH: Tandem's prefix)
 *   cc examples/c/induction.c $(pkg-config --cflags --libs tandem) -lm      (PKG_CONFIG_PATH: its pkgconfig folder) */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tandem/tandem.h"

enum { embedding = 32, head_dim = 2 * embedding };

/* A fixed pseudo-random vector of +-1 for each character, nearly orthogonal to the vectors of all other characters. */
static float embed(unsigned char c, int i) {
  uint32_t x = (uint32_t)c * 2654435761u ^ (uint32_t)(i + 1) * 2246822519u;
  x = (x ^ x >> 15) * 2654435769u;
  return (x >> 31) != 0 ? 1.0f : -1.0f;
}

static float match(const float* vector, unsigned char c) {
  float sum = 0;
  for (int i = 0; i < embedding; ++i) sum += vector[i] * embed(c, i);
  return sum / embedding;
}

static char nearest_character(const float* vector) {
  char best = ' ';
  for (char c = ' '; c < 127; ++c) {
    if (match(vector, (unsigned char)c) > match(vector, (unsigned char)best)) best = c;
  }
  return best;
}

static float* rows(int64_t n, int64_t columns) {
  float* data = calloc((size_t)(n * columns), sizeof(float));
  if (data == NULL) exit(1);
  return data;
}

static tandem_tensor tensor(float* data, int32_t ndim, int64_t* shape) {
  tandem_tensor t = {.data = data, .device = {TANDEM_CPU, 0}, .ndim = ndim, .dtype = {TANDEM_FLOAT, 32, 1}};
  t.shape = shape;
  return t;
}

static void must(tandem_status status) {
  if (status == TANDEM_OK) return;
  fprintf(stderr, "%s: %s\n", tandem_status_name(status), tandem_last_error());
  exit(1);
}

int main(void) {
  const char* text = "attention is all you need; attention is all you n";
  const int64_t n = (int64_t)strlen(text);

  float *q = rows(n, head_dim), *k = rows(n, head_dim), *v = rows(n, embedding);
  float *out = rows(n, embedding), *lse = rows(1, n), *dout = rows(n, embedding), *dv = rows(n, embedding);
  for (int64_t at = 0; at < n; ++at) {
    for (int i = 0; i < embedding; ++i) {
      if (at >= 1) q[at * head_dim + embedding + i] = embed((unsigned char)text[at - 1], i);
      q[at * head_dim + i] = embed((unsigned char)text[at], i);
      if (at >= 1) k[at * head_dim + i] = embed((unsigned char)text[at - 1], i);
      if (at >= 2) k[at * head_dim + embedding + i] = embed((unsigned char)text[at - 2], i);
      v[at * embedding + i] = embed((unsigned char)text[at], i);
    }
  }

  /* (batch, seqlen, heads, head_dim); lse is (batch, heads, seqlen). */
  int64_t qk_shape[4] = {1, n, 1, head_dim}, v_shape[4] = {1, n, 1, embedding}, lse_shape[3] = {1, 1, n};
  tandem_tensor tq = tensor(q, 4, qk_shape), tk = tensor(k, 4, qk_shape), tv = tensor(v, 4, v_shape);
  tandem_tensor tout = tensor(out, 4, v_shape), tlse = tensor(lse, 3, lse_shape);
  tandem_tensor tdout = tensor(dout, 4, v_shape), tdv = tensor(dv, 4, v_shape);

  tandem_attention_args args = {.size = sizeof args, .q = &tq, .k = &tk, .v = &tv, .out = &tout, .lse = &tlse};
  args.causal = 1;
  args.softmax_scale = 0.25;

  size_t bytes = 0;
  must(tandem_workspace_size(NULL, TANDEM_FORWARD, &args, &bytes));
  void* workspace = malloc(bytes + 1);
  must(tandem_forward(NULL, &args, workspace, bytes, NULL));
  free(workspace);

  int right = 0;
  char* predicted = calloc((size_t)n + 1, 1);
  for (int64_t at = 0; at < n; ++at) predicted[at] = nearest_character(out + at * embedding);
  for (int64_t at = 0; at + 1 < n; ++at) right += predicted[at] == text[at + 1];
  printf("Tandem %s on: %s\n\n", tandem_version(), tandem_context_description(NULL));
  printf("text        %s\npredicted    %s\n", text, predicted);
  printf(
      "next character right in %d of %d places (the first half holds nothing to copy from); it goes on with '%c'\n\n",
      right, (int)n - 1, predicted[n - 1]);

  /* Backward. With a gradient of the last row only, dv[j] is its attention weight on j times that gradient. */
  for (int i = 0; i < embedding; ++i) dout[(n - 1) * embedding + i] = 1;
  args.dout = &tdout;
  args.dv = &tdv;
  must(tandem_workspace_size(NULL, TANDEM_BACKWARD, &args, &bytes));
  workspace = malloc(bytes + 1);
  must(tandem_backward(NULL, &args, workspace, bytes, NULL));
  free(workspace);

  printf("where the last row looked (from the gradient of v):\n");
  float sum = 0;
  for (int64_t at = 0; at < n; ++at) {
    const float weight = dv[at * embedding];
    sum += weight;
    const int before = at < 4 ? (int)at : 4;
    if (weight > 0.01f) {
      printf("  %5.1f %%  at %2d: \"%.*s[%c]\"\n", 100 * weight, (int)at, before, text + at - before, text[at]);
    }
  }
  printf("weights add up to %.6f\n", sum);

  float* all[] = {q, k, v, out, lse, dout, dv};
  for (size_t i = 0; i < sizeof all / sizeof *all; ++i) free(all[i]);
  const int ok = fabsf(sum - 1) < 1e-4f && predicted[n - 1] == 'e';
  free(predicted);
  return ok ? 0 : 1;
}
