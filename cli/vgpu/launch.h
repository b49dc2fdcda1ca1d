// Launch descriptions: the kernel of a PTX file, its grid, its parameters and its memory. vgpu/docs/virtual-gpu.md has
// the format.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "cli/io/tensor.h"
#include "gpu/device.h"

namespace tandem::tool {

struct LaunchBuffer {
  enum class Fill : uint8_t { none, zeros, normal, iota, file };

  std::string name;
  io::Element type = io::Element::u8;
  std::vector<int64_t> shape;  // in elements; one dimension if only bytes are given
  size_t bytes = 0;
  Fill fill = Fill::none;
  uint64_t seed = 1;
  double scale = 1;
  std::string file;  // .npy, for Fill::file
  bool read_only = false;
  std::string expected;  // .npy, or ""
  double tolerance = 0;  // |result - expected| <= tolerance * max(1, |expected|)
};

// One value of the parameter block.
struct LaunchParameter {
  std::optional<size_t> at;      // offset in the block or in its struct; absent: the next
  size_t alignment = 1;          // in bytes
  std::vector<std::byte> bytes;  // a value; pointers and maps get theirs after allocation
  int buffer = -1;               // for a pointer or a tensor map
  int64_t offset = 0;            // from the start of that buffer; negative only for maps
  std::optional<gpu::TensorMapSpec> map;
  std::vector<LaunchParameter> parts;  // for a struct
};

struct LaunchFile {
  std::string path;  // file names are relative to this file's folder
  std::string entry;
  gpu::Dim3 grid, block, cluster;
  uint32_t dynamic_shared_bytes = 0;
  bool cooperative = false;
  std::vector<LaunchBuffer> buffers;
  std::vector<LaunchParameter> parameters;

  std::string beside(const std::string& file) const;  // path of a file in the same folder
};

// Throws io::InputError with a sentence that names the field.
LaunchFile read_launch(const std::string& path);

}  // namespace tandem::tool
