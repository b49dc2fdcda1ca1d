// Functions that the CUDA runtime provides to kernels: vprintf and __assertfail.
#include <array>
#include <cstdio>
#include <cstring>
#include <mutex>

#include "vgpu/src/machine/decode/calls.h"
#include "vgpu/src/machine/run/execute.h"
#include "vgpu/src/machine/run/resolve.h"

namespace tandem::vgpu::machine {
namespace {

using ptx::Instruction;
using ptx::Operand;
using ptx::Type;

// Arguments lie in .param variables of the call, which are in local memory.
struct CallDetail : Detail {  // places of the arguments and of the result, -1: none
  std::vector<int64_t> arguments;
  int64_t result = -1;
};

template <class T>
T argument(const Context& context, const CallDetail& detail, size_t n, uint32_t lane) {
  T value;
  const auto bytes = static_cast<size_t>(context.grid.code->local_bytes);
  std::memcpy(&value, context.warp.local.data() + lane * bytes + detail.arguments[n], sizeof value);
  return value;
}

// Reads a string in global or constant memory.
std::string string_at(uint64_t address) {
  constexpr size_t kLongest = 4096;
  if (address < 0x10000 || address >= kSharedWindow) return "";
  const char* text = reinterpret_cast<const char*>(static_cast<uintptr_t>(address));
  return {text, strnlen(text, kLongest)};
}

// Formats a conversion, "%-8.3f" or "%llu", with its argument from the packed list.
std::string convert(const std::string& form, const std::byte* arguments, size_t size, size_t* at) {
  const char kind = form.back();
  const bool wide =
      form.find('l') != std::string::npos || kind == 's' || kind == 'p' || std::strchr("fFeEgGaA", kind) != nullptr;
  const size_t bytes = wide ? 8 : 4;
  *at = (*at + bytes - 1) / bytes * bytes;
  uint64_t value = 0;
  if (*at + bytes <= size) std::memcpy(&value, arguments + *at, bytes);
  *at += bytes;
  std::string plain;  // without lengths: the value has the length of the call below
  for (const char c : form)
    if (c != 'l' && c != 'h' && c != 'z' && c != 'j' && c != 't') plain += c;
  char text[512];
  if (kind == 's') {
    std::snprintf(text, sizeof text, plain.c_str(), string_at(value).c_str());
  } else if (std::strchr("fFeEgGaA", kind) != nullptr) {
    double real;
    std::memcpy(&real, &value, 8);
    std::snprintf(text, sizeof text, plain.c_str(), real);
  } else if (kind == 'p' || kind == 'c') {
    if (kind == 'p')
      std::snprintf(text, sizeof text, "0x%llx", static_cast<unsigned long long>(value));
    else
      std::snprintf(text, sizeof text, plain.c_str(), static_cast<int>(value));
  } else {
    plain.insert(plain.size() - 1, "ll");
    const auto number = kind == 'd' || kind == 'i' ? (wide ? static_cast<int64_t>(value) : static_cast<int32_t>(value))
                                                   : static_cast<int64_t>(value);
    std::snprintf(text, sizeof text, plain.c_str(), static_cast<long long>(number));
  }
  return text;
}

std::string formatted(const std::string& format, const std::byte* arguments, size_t size) {
  std::string text;
  size_t at = 0;
  for (size_t n = 0; n < format.size(); ++n) {
    if (format[n] != '%') {
      text += format[n];
      continue;
    }
    const size_t end = format.find_first_of("diouxXcspfFeEgGaA%", n + 1);
    if (end == std::string::npos) break;
    if (format[end] == '%')
      text += '%';
    else
      text += convert(format.substr(n, end + 1 - n), arguments, size, &at);
    n = end;
  }
  return text;
}

// Reports the access to the place of the call's result.
void announce_result(Context& context, const Op& op, int64_t at) {
  std::array<uint64_t, kLanes> address;
  address.fill(static_cast<uint64_t>(at));
  LaneAccess access;
  access.memory = Memory::local;
  access.writes = true;
  access.bytes = 4;
  access.address = address.data();
  context.grid.observer->access(context.actor(op), access);
}

Step vprintf_op(Context& context, const Op& op) {
  static std::mutex mutex;
  const auto& detail = op.as<CallDetail>();
  const auto bytes = static_cast<size_t>(context.grid.code->local_bytes);
  if (detail.result >= 0 && context.grid.observer != nullptr) announce_result(context, op, detail.result);
  TANDEM_EACH_LANE(lane, context.mask) {
    const std::string format = string_at(argument<uint64_t>(context, detail, 0, lane));
    const auto list = argument<uint64_t>(context, detail, 1, lane);
    std::byte* const local = context.warp.local.data() + lane * bytes;
    const uint64_t at = in_window(list, kLocalWindow) ? list & ~kWindowMask : bytes;
    const std::string text = at < bytes ? formatted(format, local + at, bytes - at) : formatted(format, nullptr, 0);
    const std::lock_guard lock(mutex);
    std::fwrite(text.data(), 1, text.size(), stdout);
    std::fflush(stdout);
    const auto written = static_cast<int32_t>(text.size());
    if (detail.result >= 0) std::memcpy(local + detail.result, &written, 4);
  }
  return Step::next;
}

// __assertfail(message, file, line, function, character size)
Step assert_op(Context& context, const Op& op) {
  const auto& detail = op.as<CallDetail>();
  const auto lane = static_cast<uint32_t>(first_lane(context.mask));
  const auto text = [&](size_t n) { return string_at(argument<uint64_t>(context, detail, n, lane)); };
  context.finds(Rule::trap, op, "",
                str_cat("assertion failed: ", text(0), ", ", text(1), ":", argument<uint32_t>(context, detail, 2, lane),
                        " in ", text(3)),
                true);
  return Step::end;
}

}  // namespace

Status call_builtin(Builder& b, const Instruction& i, const std::string& name) {
  auto detail = std::make_unique<CallDetail>();
  const auto place_of = [&](const Operand& operand) -> int64_t {
    if (operand.kind != Operand::Kind::symbol || b.place(operand.symbol).space != ptx::Space::local) return -1;
    return static_cast<int64_t>(b.place(operand.symbol).at);
  };
  for (const Operand& operand : i.operands[2].parts) detail->arguments.push_back(place_of(operand));
  for (const int64_t at : detail->arguments)
    if (at < 0) return b.refuse(i, "an argument must be a register: use mov");
  if (!i.operands[0].parts.empty()) detail->result = place_of(i.operands[0].parts[0]);
  if (name == "vprintf" && detail->arguments.size() == 2) {
    b.emit(vprintf_op, std::move(detail));
  } else if (name == "__assertfail" && detail->arguments.size() >= 4) {
    b.emit(assert_op, std::move(detail));
  } else {
    return b.refuse(i, name + " must have code in the module: link its code");
  }
  return {};
}

}  // namespace tandem::vgpu::machine
