#include "vgpu/tests/instructions/recording.h"

#include <bit>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <optional>
#include <set>
#include <sstream>
#include <stdexcept>

#include "base/text.h"
#include "support/base64.h"
#include "vgpu/src/ptx/parser.h"
#include "vgpu/src/units/numbers.h"

namespace tandem::test {
namespace {

using vgpu::units::Format;

class Hash {  // FNV-1a
 public:
  void bytes(const void* data, size_t count) {
    const auto* at = static_cast<const unsigned char*>(data);
    for (size_t i = 0; i < count; ++i) value_ = (value_ ^ at[i]) * 0x100000001b3u;
  }
  void number(uint64_t x) {  // the same on machines of either byte order
    for (int i = 0; i < 8; ++i) value_ = (value_ ^ (x >> (8 * i) & 0xff)) * 0x100000001b3u;
  }
  uint64_t value() const { return value_; }

 private:
  uint64_t value_ = 0xcbf29ce484222325u;
};

void add(const gpu::Dim3& size, Hash* hash) { hash->number(size.x), hash->number(size.y), hash->number(size.z); }

void add(const MapParameter& map, Hash* hash) {
  const gpu::TensorMapSpec& spec = map.spec;
  for (const auto field : {static_cast<int32_t>(spec.type), spec.rank, static_cast<int32_t>(spec.swizzle),
                           static_cast<int32_t>(spec.l2_promotion), static_cast<int32_t>(spec.oob_fill)})
    hash->number(static_cast<uint64_t>(field));
  for (int i = 0; i < spec.rank; ++i)
    hash->number(spec.dims[i]), hash->number(spec.byte_strides[i]), hash->number(spec.box[i]),
        hash->number(spec.element_strides[i]);
  hash->number(map.of), hash->number(map.offset);
}

// ---- Approximate functions ----
// The error that the ISA allows: |error| <= absolute or |error| <= relative * |result|.
struct Approximation {
  const char* opcode;
  Format format;
  double relative, absolute;
};
constexpr double kUlp = 0x1p-23, kTiny = 0x1p-126;  // tiny: one result flushed, the other just not
const Approximation kApproximations[] = {
    {"ex2", Format::f32, 2 * kUlp, kTiny},   {"rcp", Format::f32, kUlp, kTiny},
    {"rsqrt", Format::f32, 3 * kUlp, kTiny}, {"sqrt", Format::f32, 3 * kUlp, kTiny},
    {"div", Format::f32, 2 * kUlp, kTiny},   {"lg2", Format::f32, 0x1p-22, 0x1p-22},
    {"sin", Format::f32, 0, 0x1p-14},        {"cos", Format::f32, 0, 0x1p-14},
    {"tanh", Format::f32, 0x1p-10, kTiny},   {"ex2", Format::f16, 0x1.2p-10, 0x1p-24},
    {"ex2", Format::bf16, 0x1p-7, kTiny},    {"tanh", Format::f16, 0, 0x1.2p-11},
    {"tanh", Format::bf16, 0, 0x1p-8},
};

// Returns the approximation of an instruction, if any. Divisions and roots that name a rounding are exact.
const Approximation* approximation_of(const vgpu::ptx::Instruction& instruction) {
  if (!instruction.has("approx") && !instruction.has("full")) return nullptr;
  for (const Approximation& a : kApproximations) {
    const std::string type = vgpu::units::name_of(a.format);
    if (instruction.opcode == a.opcode && (instruction.has(type) || instruction.has(type + "x2"))) return &a;
  }
  throw std::runtime_error(instruction.full_name() + " has no error bound here");
}

// A function of a program. A kernel here has one such function, and its results are the kernel's only output.
const Approximation* approximation_of(const std::string& text) {
  vgpu::ptx::Module module;
  const Status status = vgpu::ptx::parse(text, &module);
  if (!status.ok()) throw std::runtime_error(status.message);
  for (const auto& function : module.functions)
    for (const auto& instruction : function.instructions)
      if (const Approximation* a = approximation_of(instruction)) return a;
  return nullptr;
}

// An infinity counts as the next number after the largest.
double number_of(uint32_t code, Format format) {
  const double x = vgpu::units::decode(code, format);
  return std::isinf(x) ? std::copysign(format == Format::f16 ? 0x1p16 : 0x1p128, x) : x;
}

// Two results within the bound of the exact value are within twice the bound of each other.
bool close(const Approximation& a, uint32_t x_code, uint32_t y_code) {
  const double x = number_of(x_code, a.format), y = number_of(y_code, a.format);
  if (std::isnan(x) || std::isnan(y)) return std::isnan(x) && std::isnan(y);
  return std::fabs(x - y) <= 2 * std::max(a.absolute, a.relative * std::max(std::fabs(x), std::fabs(y)));
}

uint32_t element(const std::vector<std::byte>& bytes, size_t at, size_t size) {
  uint32_t code = 0;
  for (size_t i = 0; i < size; ++i) code |= std::to_integer<uint32_t>(bytes[at + i]) << (8 * i);
  return code;
}

std::string hex(uint64_t x) {
  char text[17];
  std::snprintf(text, sizeof text, "%016llx", static_cast<unsigned long long>(x));
  return text;
}

std::vector<std::byte> outputs_of(const BenchKernel& done) {
  std::vector<std::byte> bytes;
  for (const Memory& memory : done.memory)
    if (memory.output && !memory.scratch) bytes.insert(bytes.end(), memory.bytes.begin(), memory.bytes.end());
  return bytes;
}

Record read_line(const std::string& line, uint64_t* key) {
  std::istringstream words(line);
  std::string outputs;
  Record record;
  words >> std::hex >> *key >> record.digest;
  if (!words) throw std::runtime_error("neither \"test\", a word of the head, nor two numbers in hex");
  words >> outputs;
  record.outputs = from_base64(outputs);
  return record;
}

std::string variable(const char* name) {
  const char* value = std::getenv(name);
  return value == nullptr ? "" : value;
}

// ---- While recording ----
void write(uint64_t key, const Record& record) {
  static std::set<uint64_t> written;
  static std::string last_test;
  if (!written.insert(key).second) return;
  std::ofstream file(variable(kRecordVariable), std::ios::app);
  const auto* info = testing::UnitTest::GetInstance()->current_test_info();
  const std::string test = std::string(info->test_suite_name()) + "." + info->name();
  if (test != last_test) file << "test " << test << "\n";
  last_test = test;
  file << line_of(key, record) << "\n";
  if (!file.flush()) ADD_FAILURE() << "cannot write " << variable(kRecordVariable);
}

// The results of vgpu:h200 for the next launch of the recorded device. Differences are printed at once, because the
// file does not keep the numbers.
struct Virtual {
  uint64_t key = 0;
  std::vector<std::byte> outputs;
};
Virtual last_virtual;

void report_difference(uint64_t key, const Record& record, const std::vector<std::byte>& real,
                       const std::string& text) {
  if (last_virtual.key != key) return;
  Record ours = record;
  Hash hash;
  hash.bytes(last_virtual.outputs.data(), last_virtual.outputs.size());
  ours.digest = hash.value();
  if (!record.outputs.empty()) ours.outputs = last_virtual.outputs;
  const std::string how = difference(record, ours, text);
  if (how.empty()) return;
  const auto* info = testing::UnitTest::GetInstance()->current_test_info();
  std::printf("DIFFERS: %s.%s: %s: %s\n", info->test_suite_name(), info->name(), hex(key).c_str(), how.c_str());
  int shown = 0;
  for (size_t at = 0; at + 4 <= real.size() && shown < 8; at += 4) {
    const uint32_t x = element(real, at, 4), y = element(last_virtual.outputs, at, 4);
    if (x != y) std::printf("  byte %zu: %08x here, %08x on vgpu:h200\n", at, x, y), ++shown;
  }
  std::printf("%s\n", text.c_str());
}

}  // namespace

Recording read_recording(const std::string& path) {
  Recording recording;
  recording.path = path;
  std::ifstream file(path);
  int number = 0;
  for (std::string line; std::getline(file, line);) {
    ++number;
    try {
      const std::string word = line.substr(0, line.find(' '));
      if (word == "device") recording.device = line.substr(word.size() + 1);
      if (line.empty() || word == "#" || word == "device" || word == "driver" || word == "date" || word == "commit" ||
          word == "test")
        continue;
      uint64_t key = 0;
      Record record = read_line(line, &key);
      recording.records[key] = std::move(record);
    } catch (const std::runtime_error& error) {
      throw std::runtime_error(str_cat(path, ":", number, ": ", error.what()));
    }
  }
  return recording;
}

const Recording& the_recording() {
  static const Recording recording = [] {
    const std::string other = variable(kRecordedVariable);
    return read_recording(other.empty() ? TANDEM_INSTRUCTIONS_RECORDED : other);
  }();
  return recording;
}

uint64_t key_of(const BenchKernel& kernel, const std::string& text) {
  Hash hash;
  hash.number(text.size());
  hash.bytes(text.data(), text.size());
  add(kernel.grid, &hash), add(kernel.block, &hash), add(kernel.cluster, &hash);
  hash.number(kernel.dynamic_smem_bytes);
  for (const Memory& memory : kernel.memory) {
    hash.number(memory.bytes.size()), hash.number(memory.output ? 1 : 0);
    hash.bytes(memory.bytes.data(), memory.bytes.size());
  }
  for (const MapParameter& map : kernel.maps) add(map, &hash);
  return hash.value();
}

Record record_of(const BenchKernel& done, const std::string& text) {
  Record record;
  record.outputs = outputs_of(done);
  Hash hash;
  hash.bytes(record.outputs.data(), record.outputs.size());
  record.digest = hash.value();
  if (approximation_of(text) == nullptr) record.outputs.clear();
  return record;
}

std::string line_of(uint64_t key, const Record& record) {
  return str_cat(hex(key), " ", hex(record.digest), record.outputs.empty() ? "" : " ", to_base64(record.outputs));
}

std::string difference(const Record& recorded, const Record& got, const std::string& text) {
  if (recorded.digest == got.digest) return "";
  const Approximation* a = approximation_of(text);
  if (a == nullptr) return "not the recorded bits, and the program has no approximate function";
  if (recorded.outputs.size() != got.outputs.size())
    return str_cat(recorded.outputs.size(), " bytes are recorded and ", got.outputs.size(), " are there");
  const size_t size = a->format == Format::f32 ? 4 : 2;
  for (size_t at = 0; at + size <= got.outputs.size(); at += size) {
    const uint32_t x = element(recorded.outputs, at, size), y = element(got.outputs, at, size);
    if (x != y && !close(*a, x, y))
      return str_cat("byte ", at, ": ", hex(x), " is recorded, ", hex(y), " is there, farther off than ", a->opcode,
                     " allows both");
  }
  return "";
}

void recorded_launch(const Bench& bench, uint64_t key, const BenchKernel& done, const std::string& text) {
  const bool recording = !variable(kRecordVariable).empty();
  if (recording) {
    const std::string device = variable(kRecordDeviceVariable);
    if (bench.name == (device.empty() ? "cuda" : device) && bench.has(Needs::hopper)) {
      const Record record = record_of(done, text);
      write(key, record);
      report_difference(key, record, outputs_of(done), text);
    } else if (bench.name == "vgpu:h200") {
      last_virtual = {key, outputs_of(done)};
    }
    return;
  }
  if (bench.name != "vgpu:h200") return;
  const auto found = the_recording().records.find(key);
  if (found == the_recording().records.end()) return;
  const std::string how = difference(found->second, record_of(done, text), text);
  if (!how.empty())
    ADD_FAILURE() << "against " << the_recording().device << " (" << the_recording().path << ", " << hex(key)
                  << "): " << how << "\n"
                  << text;
}

}  // namespace tandem::test
