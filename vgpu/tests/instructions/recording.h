// What a real GPU left of the kernels of this folder: written on a machine that has one (tools/gpu/record.sh), read
// everywhere else, where the virtual GPU must leave the same.
//
// Lines of text. A head (device, driver, date, commit), then of each test, behind "test Suite.Name", one line per
// launch:
//
//   <key> <digest> [<outputs>]
//
// key: of all that decides the result, which is the PTX, the launch's shape, the memory before it and the tensor maps.
// digest: of the memory afterwards that the kernel may write. Both are 64-bit FNV-1a in hex. outputs: that memory in
// base64, only where approximate functions compute it, so that bits may differ. Everywhere else they may not: products
// and atomic sums of this folder are of numbers whose sums are exact in any order.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "vgpu/tests/instructions/bench.h"

namespace tandem::test {

// Environment. A file: launches on the recorded device are added to it; and that device, if not "cuda".
inline constexpr const char* kRecordVariable = "TANDEM_RECORD";
inline constexpr const char* kRecordDeviceVariable = "TANDEM_RECORD_DEVICE";
// A file to read in place of the one of this folder.
inline constexpr const char* kRecordedVariable = "TANDEM_RECORDED";

struct Record {
  uint64_t digest = 0;
  std::vector<std::byte> outputs;  // empty: the digest says all
};
struct Recording {
  std::string path, device;            // device: what the head says; "" without a file
  std::map<uint64_t, Record> records;  // by key
};
// Throws std::runtime_error, by line, when it is no such file. A file that is not there is an empty recording.
Recording read_recording(const std::string& path);
const Recording& the_recording();  // that of the environment or of this folder

// Of a kernel before its launch.
uint64_t key_of(const BenchKernel& kernel, const std::string& text);
Record record_of(const BenchKernel& done, const std::string& text);
std::string line_of(uint64_t key, const Record& record);

// How a device's result differs from a recorded one beyond what the program's functions may; "" when it does not.
std::string difference(const Record& recorded, const Record& got, const std::string& text);

// What one launch means for the recording that is made, or read: to be told of each, with the key from before it.
void recorded_launch(const Bench& bench, uint64_t key, const BenchKernel& done, const std::string& text);

}  // namespace tandem::test
