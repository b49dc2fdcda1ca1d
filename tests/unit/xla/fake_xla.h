// A runtime with XLA's foreign function interface, and frames of custom calls.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <deque>
#include <memory>
#include <string>
#include <vector>

#include "tandem/tandem.h"
#include "xla/ffi.h"

struct XlaError {
  std::string message;
  int32_t code;
};

namespace tandem::test {

class FakeXla {
 public:
  FakeXla() {
    api.struct_size = sizeof api;
    api.version = {sizeof api.version, nullptr, kXlaMajor, kXlaMinor};
    api.new_error = [](XlaNewError* args) { return new XlaError{args->message, args->code}; };
    api.error_message = [](XlaErrorMessage* args) { args->message = args->error->message.c_str(); };
    api.delete_error = [](XlaOldError* args) { delete args->error; };
    api.stream = [](XlaStream* args) -> XlaError* {
      args->stream = of(args->context)->stream;
      return nullptr;
    };
    api.ordinal = [](XlaOrdinal* args) -> XlaError* {
      args->ordinal = of(args->context)->ordinal;
      return nullptr;
    };
    api.allocate = [](XlaAllocation* args) -> XlaError* {
      if (of(args->context)->is_full) return new XlaError{"out of memory", kXlaResourceExhausted};
      args->data = std::malloc(args->bytes);
      of(args->context)->allocated.push_back(args->bytes);
      return nullptr;
    };
    api.release = [](XlaRelease* args) -> XlaError* {
      std::free(args->data);
      of(args->context)->released.push_back(args->bytes);
      return nullptr;
    };
  }
  FakeXla(const FakeXla&) = delete;
  FakeXla& operator=(const FakeXla&) = delete;

  XlaApi api{};
  void* stream = nullptr;
  int32_t ordinal = 0;
  bool is_full = false;
  std::vector<size_t> allocated, released;

 private:
  static FakeXla* of(XlaContext* context) { return reinterpret_cast<FakeXla*>(context); }
};

// The arguments, results and attributes of a custom call.
class FakeFrame {
 public:
  explicit FakeFrame(FakeXla* xla) : xla_(xla) {}
  FakeFrame(const FakeFrame&) = delete;
  FakeFrame& operator=(const FakeFrame&) = delete;

  void input(const std::string& name, int32_t type, void* data, std::vector<int64_t> dims) {
    add(&inputs_, &input_names, name, type, data, std::move(dims));
  }
  void output(const std::string& name, int32_t type, void* data, std::vector<int64_t> dims) {
    add(&outputs_, &output_names, name, type, data, std::move(dims));
  }
  void number(const std::string& name, int64_t value) { scalar(name, kXlaS64, &integers_.emplace_back(value)); }
  void number(const std::string& name, int32_t value) { scalar(name, kXlaS32, &integers_.emplace_back(value)); }
  void number(const std::string& name, double value) { scalar(name, kXlaF64, &reals_.emplace_back(value)); }
  void number(const std::string& name, bool value) { scalar(name, kXlaPred, &integers_.emplace_back(value)); }
  void scalar(const std::string& name, int32_t type, void* value) {
    attribute(name, kXlaScalarAttribute, &scalars_.emplace_back(XlaScalar{type, value}));
  }
  void text(const std::string& name, const std::string& value) {
    const std::string& kept = texts_.emplace_back(value);
    attribute(name, kXlaTextAttribute, &views_.emplace_back(XlaText{kept.data(), kept.size()}));
  }
  void attribute(const std::string& name, int32_t kind, void* value) {
    const std::string& kept = texts_.emplace_back(name);
    names_.push_back(&views_.emplace_back(XlaText{kept.data(), kept.size()}));
    kinds_.push_back(kind);
    values_.push_back(value);
  }

  // Runs a handler once. Returns "", or the error's message, and its code in `code`.
  template <class Handler>
  std::string run(Handler&& handler) {
    text("inputs", input_names);
    text("outputs", output_names);
    XlaFrame frame{sizeof frame,
                   nullptr,
                   &xla_->api,
                   reinterpret_cast<XlaContext*>(xla_),
                   3,
                   {sizeof frame.inputs, nullptr, static_cast<int64_t>(inputs_.size()), nullptr, inputs_.data()},
                   {sizeof frame.outputs, nullptr, static_cast<int64_t>(outputs_.size()), nullptr, outputs_.data()},
                   {sizeof frame.attributes, nullptr, static_cast<int64_t>(names_.size()), kinds_.data(), names_.data(),
                    values_.data()}};
    const std::unique_ptr<XlaError> error(handler(&frame));
    code = error == nullptr ? 0 : error->code;
    return error == nullptr ? "" : error->message;
  }

  int32_t code = 0;
  std::string input_names, output_names;

 private:
  void add(std::vector<void*>* buffers, std::string* names, const std::string& name, int32_t type, void* data,
           std::vector<int64_t> dims) {
    *names += (names->empty() ? "" : ",") + name;
    std::vector<int64_t>& kept = dims_.emplace_back(std::move(dims));
    buffers->push_back(&buffers_.emplace_back(
        XlaBuffer{sizeof(XlaBuffer), nullptr, type, data, static_cast<int64_t>(kept.size()), kept.data()}));
  }

  FakeXla* xla_;
  std::deque<XlaBuffer> buffers_;
  std::deque<std::vector<int64_t>> dims_;
  std::vector<void*> inputs_, outputs_, values_;
  std::vector<int32_t> kinds_;
  std::vector<XlaText*> names_;
  std::deque<std::string> texts_;
  std::deque<XlaText> views_;
  std::deque<XlaScalar> scalars_;
  std::deque<int64_t> integers_;
  std::deque<double> reals_;
};

}  // namespace tandem::test
