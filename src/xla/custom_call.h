// A custom call of XLA as tandem_attention_args: names from the attributes "inputs" and "outputs", options by the names
// of problem/options.def.
#pragma once

#include <deque>
#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"
#include "xla/ffi.h"

namespace tandem::xla {

// Attributes:
//   inputs, outputs   comma-separated names of the buffers, in order: a member of tandem_attention_args, "seed", or
//                     "score_mod.NAME" and "mask_mod.NAME" for the tensors of an expression. The output
//                     "dscore_mod.NAME" is the gradient of "score_mod.NAME".
//   <member>          a number of tandem_attention_args: causal, softcap, window_left, ...
//   score_mod         an expression; "score_mod.NAME" is the value of a number that it names. mask_mod is alike.
class CustomCall {
 public:
  // device: the device of all tensors.
  explicit CustomCall(tandem_device device) : device_(device) {}
  CustomCall(const CustomCall&) = delete;
  CustomCall& operator=(const CustomCall&) = delete;

  // Reads the buffers and attributes of a frame, which must outlive the call.
  Status read(const XlaFrame& frame);
  const tandem_attention_args& args() const { return args_; }

 private:
  struct Expression {
    tandem_mod mod{};
    std::string text;
    std::vector<tandem_mod_scalar> scalars;
    std::vector<tandem_mod_tensor> tensors;
  };

  Status read_buffers(std::string_view names, const char* attribute, const XlaBuffers& buffers);
  Status read_tensor(std::string_view name, const XlaBuffer& buffer);
  Status read_seed(const XlaBuffer& buffer);
  Status read_attribute(std::string_view name, int32_t kind, const void* value);
  Status read_scalar(std::string_view name, const XlaScalar& scalar);
  Expression* expression_of(std::string_view name);
  Status add_gradient(std::string_view name, const tandem_tensor* gradient);
  Status add_number(Expression* expression, std::string_view name, const XlaScalar& scalar);
  void finish(Expression* expression, const tandem_mod** member);

  tandem_device device_;
  tandem_attention_args args_{};
  std::deque<tandem_tensor> tensors_;  // stable addresses
  std::deque<std::string> names_;
  Expression score_mod_, mask_mod_;
};

}  // namespace tandem::xla
