/* A needle in a haystack, on a GPU, in C: each query finds its own key among 2000 keys.
 *
 *   ./tandem_example_cuda_c [cuda:0 | vgpu:h200 | vgpu:b200]
 *
 * Build it from any folder:
 *   cmake -S examples/cuda -B /tmp/example && cmake --build /tmp/example       (CMAKE_PREFIX_PATH: Tandem's prefix) */
#include "driver.h"
#include "tandem/tandem.h"

enum { queries = 64, keys = 2000, heads = 2, head_dim = 64 };

/* bfloat16 is the upper half of a float. */
static uint16_t to_bf16(float x) {
  uint32_t bits;
  memcpy(&bits, &x, sizeof bits);
  return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

/* +-1, different for each key, head and column. */
static float key_of(int key, int head, int column) {
  uint32_t x = (uint32_t)(key * heads + head) * 2654435761u ^ (uint32_t)(column + 1) * 2246822519u;
  x = (x ^ x >> 15) * 2654435769u;
  return (x ^ x >> 13) * 2246822519u >> 31 != 0 ? 1.0f : -1.0f;
}
static int needle_of(int query) { return query * 1237 % keys; }

static void must(tandem_status status) {
  if (status == TANDEM_OK) return;
  fprintf(stderr, "%s: %s\n", tandem_status_name(status), tandem_last_error());
  exit(status == TANDEM_NO_COMPILER ? 77 : 1);
}

int main(int argc, char** argv) {
  const char* device = argc > 1 ? argv[1] : "cuda:0";
  const gpu_memory gpu = gpu_open_named(device);
  const tandem_context_options options = {.size = sizeof options, .device = device};
  tandem_context* context;
  must(tandem_context_create(&options, &context));
  printf("Tandem %s on: %s\n", tandem_version(), tandem_context_description(context));

  /* On the host: (1, seqlen, heads, head_dim). Queries equal their needles; the first column of a value is its
   * number modulo 64. */
  const size_t q_bytes = sizeof(uint16_t) * queries * heads * head_dim,
               k_bytes = sizeof(uint16_t) * keys * heads * head_dim;
  const size_t out_bytes = sizeof(float) * queries * heads * head_dim;
  uint16_t *q = malloc(q_bytes), *k = malloc(k_bytes), *v = calloc(1, k_bytes);
  float* out = malloc(out_bytes);
  if (q == NULL || k == NULL || v == NULL || out == NULL) return 1;
  for (int head = 0; head < heads; ++head) {
    for (int c = 0; c < head_dim; ++c) {
      for (int i = 0; i < queries; ++i) q[(i * heads + head) * head_dim + c] = to_bf16(key_of(needle_of(i), head, c));
      for (int j = 0; j < keys; ++j) k[(j * heads + head) * head_dim + c] = to_bf16(key_of(j, head, c));
    }
    for (int j = 0; j < keys; ++j) v[(j * heads + head) * head_dim] = to_bf16((float)(j % 64));
  }

  /* On the GPU. out is float32, which keeps the digits that bfloat16 would lose. */
  void* const stream = gpu_stream(&gpu);
  void *const dq = gpu_allocate(&gpu, q_bytes), *const dk = gpu_allocate(&gpu, k_bytes);
  void *const dv = gpu_allocate(&gpu, k_bytes), *const dout = gpu_allocate(&gpu, out_bytes);
  gpu_copy_to(&gpu, dq, q, q_bytes, stream);
  gpu_copy_to(&gpu, dk, k, k_bytes, stream);
  gpu_copy_to(&gpu, dv, v, k_bytes, stream);

  int64_t q_shape[4] = {1, queries, heads, head_dim}, k_shape[4] = {1, keys, heads, head_dim};
  const tandem_device place = {strncmp(device, "cuda", 4) == 0 ? TANDEM_CUDA : TANDEM_CPU,
                               strlen(device) > 5 && device[0] == 'c' ? atoi(device + 5) : 0};
  const tandem_dtype bf16 = {TANDEM_BFLOAT, 16, 1}, f32 = {TANDEM_FLOAT, 32, 1};
  const tandem_tensor tq = {dq, place, 4, bf16, q_shape, NULL, 0}, tk = {dk, place, 4, bf16, k_shape, NULL, 0};
  const tandem_tensor tv = {dv, place, 4, bf16, k_shape, NULL, 0}, tout = {dout, place, 4, f32, q_shape, NULL, 0};
  tandem_attention_args args = {.size = sizeof args, .q = &tq, .k = &tk, .v = &tv, .out = &tout};
  args.softmax_scale = 0.5; /* the needle's score is 32, other scores are about +-4 */

  size_t bytes = 0;
  must(tandem_workspace_size(context, TANDEM_FORWARD, &args, &bytes));
  must(tandem_prepare(context, TANDEM_FORWARD, &args)); /* compiles the kernel, else the first call does */
  void* const workspace = bytes > 0 ? gpu_allocate(&gpu, bytes) : NULL;
  must(tandem_forward(context, &args, workspace, bytes, stream));
  gpu_copy_back(&gpu, out, dout, out_bytes, stream);

  int found = 0;
  for (int i = 0; i < queries; ++i) {
    for (int head = 0; head < heads; ++head) {
      const float wanted = (float)(needle_of(i) % 64), got = out[(i * heads + head) * head_dim];
      found += got - wanted < 0.25f && wanted - got < 0.25f;
    }
  }
  printf("%d of %d queries found their needle among %d keys\n", found, queries * heads, keys);
  gpu_release(&gpu, dq);
  gpu_release(&gpu, dk);
  gpu_release(&gpu, dv);
  gpu_release(&gpu, dout);
  if (workspace != NULL) gpu_release(&gpu, workspace);
  tandem_context_destroy(context);
  free(q);
  free(k);
  free(v);
  free(out);
  return found == queries * heads ? 0 : 1;
}
