/* The C call that every binding in this folder makes. */
#ifndef TANDEM_BENCH_BOUNDARY_CALL_H_
#define TANDEM_BENCH_BOUNDARY_CALL_H_

#include <tandem/tandem.h>

/* window_left and window_right: negative means unbounded. */
static inline tandem_status boundary_call(const tandem_tensor* q, const tandem_tensor* k, const tandem_tensor* v,
                                          const tandem_tensor* out, double softmax_scale, double softcap,
                                          int64_t causal, int64_t window_left, int64_t window_right) {
  static char workspace[1 << 24];
  tandem_attention_args args = {sizeof args, q, k, v, out};
  args.softmax_scale = softmax_scale;
  args.softcap = softcap;
  args.causal = (int32_t)causal;
  args.window = (window_left >= 0 ? TANDEM_WINDOW_LEFT : 0) | (window_right >= 0 ? TANDEM_WINDOW_RIGHT : 0);
  args.window_left = window_left >= 0 ? window_left : 0;
  args.window_right = window_right >= 0 ? window_right : 0;
  return tandem_forward(NULL, &args, workspace, sizeof workspace, NULL);
}

#endif
