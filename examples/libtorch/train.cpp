// Attention with gradients for libtorch, PyTorch's C++ library, without Python.
//
// attention() is an operator of autograd that computes on the tensors' memory in place. The program trains queries and
// keys through it, so that each position attends to its predecessor, and compares results with torch's own attention.
//
// The wheel of torch contains libtorch. Build the example from any folder:
//   torch=$(python -c 'import torch; print(torch.utils.cmake_prefix_path)')
//   cmake -S examples/libtorch -B /tmp/example -DCMAKE_PREFIX_PATH="$torch;<Tandem's prefix>" && cmake --build
//   /tmp/example
#include <ATen/ATen.h>
#include <torch/csrc/autograd/custom_function.h>

#include <cstdio>
#include <exception>
#include <span>
#include <stdexcept>
#include <vector>

#include "tandem/tandem.hpp"

namespace {

tandem_dtype dtype_of(const at::Tensor& x) {
  switch (x.scalar_type()) {
    case at::kFloat: return tandem::float32;
    case at::kDouble: return tandem::float64;
    case at::kHalf: return tandem::float16;
    case at::kBFloat16: return tandem::bfloat16;
    default: throw std::invalid_argument("dtype must be a floating-point type of at most 64 bits: convert the tensor");
  }
}

// The same memory as a tensor of Tandem, with its strides and device.
tandem::Tensor view(const at::Tensor& x) {
  const auto sizes = [](at::IntArrayRef values) { return tandem::Sizes(std::span(values.data(), values.size())); };
  tandem::Tensor tensor(dtype_of(x), x.data_ptr(), sizes(x.sizes()), sizes(x.strides()));
  return x.is_cuda() ? tensor.on(tandem::cuda(x.get_device())) : tensor;
}

// q, k, v: (batch, seqlen, heads, head_dim). On a GPU pass a Context of "cuda:N", a Workspace and the current stream.
struct CausalAttention : torch::autograd::Function<CausalAttention> {
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& q, const at::Tensor& k,
                            const at::Tensor& v) {
    at::Tensor out = at::empty_like(q, at::MemoryFormat::Contiguous);
    at::Tensor lse = at::empty({q.size(0), q.size(2), q.size(1)}, q.options().dtype(at::kFloat));
    tandem::forward({.q = view(q), .k = view(k), .v = view(v), .out = view(out), .lse = view(lse), .causal = true});
    context->save_for_backward({q, k, v, out, lse});
    return out;
  }

  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 const torch::autograd::variable_list& gradients) {
    const auto saved = context->get_saved_variables();
    const at::Tensor &q = saved[0], &k = saved[1], &v = saved[2], &out = saved[3], &lse = saved[4];
    const at::Tensor dout = gradients[0].contiguous();
    at::Tensor dq = at::empty_like(q), dk = at::empty_like(k), dv = at::empty_like(v);
    tandem::backward({.q = view(q),
                      .k = view(k),
                      .v = view(v),
                      .out = view(out),
                      .lse = view(lse),
                      .dout = view(dout),
                      .dq = view(dq),
                      .dk = view(dk),
                      .dv = view(dv),
                      .causal = true});
    return {dq, dk, dv};
  }
};

at::Tensor attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v) {
  return CausalAttention::apply(q, k, v);
}

at::Tensor torch_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v) {
  const auto heads_first = [](const at::Tensor& x) { return x.transpose(1, 2); };
  return at::scaled_dot_product_attention(heads_first(q), heads_first(k), heads_first(v), {}, 0, /*is_causal=*/true, {},
                                          /*enable_gqa=*/true)
      .transpose(1, 2);
}

// out and the gradients of q, k and v for a fixed dout, in float64.
template <class F>
std::vector<at::Tensor> results(F function, const std::vector<at::Tensor>& inputs, at::ScalarType type) {
  std::vector<at::Tensor> leaves;
  for (size_t i = 0; i < 3; ++i) leaves.push_back(inputs[i].to(type).detach().requires_grad_(true));
  const at::Tensor out = function(leaves[0], leaves[1], leaves[2]);
  out.backward(inputs[3].to(type));
  std::vector<at::Tensor> all = {out.detach().to(at::kDouble)};
  for (const at::Tensor& x : leaves) all.push_back(x.grad().to(at::kDouble));
  return all;
}

// Returns true if each relative error against float64 (of the norms) is at most twice the error of torch's attention in
// float32.
bool agrees_with_torch() {
  const at::Tensor q = at::randn({2, 96, 4, 64}), k = at::randn({2, 96, 2, 64}), v = at::randn({2, 96, 2, 64});
  const std::vector<at::Tensor> inputs = {q, k, v, at::randn_like(q)};
  const auto exact = results(torch_attention, inputs, at::kDouble);
  const auto of_torch = results(torch_attention, inputs, at::kFloat), ours = results(attention, inputs, at::kFloat);
  const char* const names[] = {"out", "dq", "dk", "dv"};
  bool agrees = true;
  for (size_t i = 0; i < exact.size(); ++i) {
    const auto error = [&](const at::Tensor& x) { return ((x - exact[i]).norm() / exact[i].norm()).item<double>(); };
    std::printf("%-4s error against float64 %.2g, of torch's own attention %.2g\n", names[i], error(ours[i]),
                error(of_torch[i]));
    agrees = agrees && error(ours[i]) <= 2 * error(of_torch[i]);
  }
  return agrees;
}

// Returns true if gradient descent reduces the loss to less than a tenth.
bool train() {
  const at::Tensor v = at::randn({1, 32, 4, 32});
  at::Tensor q = (0.1 * at::randn_like(v)).requires_grad_(true), k = (0.1 * at::randn_like(v)).requires_grad_(true);
  const at::Tensor target = v.slice(1, 0, 31);
  double first = 0, loss = 0;
  for (int step = 0; step <= 60; ++step) {
    const at::Tensor error = (attention(q, k, v).slice(1, 1, 32) - target).square().mean();
    error.backward();
    loss = error.item<double>();
    if (step == 0) first = loss;
    if (step % 20 == 0) std::printf("step %3d: loss %.4f\n", step, loss);
    for (at::Tensor* x : {&q, &k}) {
      const at::Tensor gradient = x->grad();
      *x = (x->detach() - 0.3 * gradient / (gradient.square().mean().sqrt() + 1e-8)).requires_grad_(true);
    }
  }
  return loss < first / 10;
}

}  // namespace

int main() try {
  at::manual_seed(1);
  std::printf("Tandem %s on: %s\n", tandem_version(), tandem::Context().description().c_str());
  if (!agrees_with_torch()) return std::puts("The results differ from torch's."), 1;
  return train() ? 0 : (std::puts("The training did not converge."), 1);
} catch (const std::exception& error) {
  std::fprintf(stderr, "error: %s\n", error.what());
  return 1;
}
