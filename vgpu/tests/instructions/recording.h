// Recordings of a GPU's results for the kernels of this folder. A machine with a GPU writes recordings
// (tools/gpu/record.sh), and the virtual GPU must reproduce them on every machine.
//
// The file has lines of text: a head (device, driver, date, commit), then for each test, after "test Suite.Name", one
// line per launch:
//
//   <key> <digest> [<outputs>]
//
// key: hash of everything that decides the result: the PTX, the launch's shape, the memory before it and the tensor
// maps. digest: hash of the memory afterwards that the kernel may write. Both hashes are 64-bit FNV-1a in hex. outputs:
// that memory in base64, only if approximate functions compute it, so that bits may differ. All other bits must agree:
// products and atomic sums of this folder have numbers whose sums are exact in any order.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "vgpu/tests/instructions/bench.h"

namespace tandem::test {

// Environment variables. A file: launches on the recorded device are added to it. A device: the recorded device, by
// default "cuda".
inline constexpr const char* kRecordVariable = "TANDEM_RECORD";
inline constexpr const char* kRecordDeviceVariable = "TANDEM_RECORD_DEVICE";
// A file that replaces the recording of this folder.
inline constexpr const char* kRecordedVariable = "TANDEM_RECORDED";

struct Record {
  uint64_t digest = 0;
  std::vector<std::byte> outputs;  // empty: the digest is enough
};
struct Recording {
  std::string path, device;            // device: from the head; "" without a file
  std::map<uint64_t, Record> records;  // by key
};
// Throws std::runtime_error with the line if the file is no recording. A missing file is an empty recording.
Recording read_recording(const std::string& path);
const Recording& the_recording();  // the file that the environment names, or of this folder

// Returns the key of a kernel before its launch.
uint64_t key_of(const BenchKernel& kernel, const std::string& text);
Record record_of(const BenchKernel& done, const std::string& text);
std::string line_of(uint64_t key, const Record& record);

// Describes how a device's result differs from a recorded result beyond the allowed error; "" without a difference.
std::string difference(const Record& recorded, const Record& got, const std::string& text);

// Records or compares one launch. key: computed before the launch.
void recorded_launch(const Bench& bench, uint64_t key, const BenchKernel& done, const std::string& text);

}  // namespace tandem::test
