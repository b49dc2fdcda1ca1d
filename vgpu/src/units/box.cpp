#include "vgpu/src/units/box.h"

#include <algorithm>
#include <bit>
#include <cstring>

#include "base/text.h"
#include "vgpu/src/units/tensor_map.h"

namespace tandem::vgpu::units {
namespace {

constexpr uint32_t kChunk = 16;

uint32_t row_bytes_of(const gpu::TensorMapSpec& map) {
  return map.box[0] * static_cast<uint32_t>(shared_bits(map.type)) / 8;
}

// Returns the bytes of a chunk without padding, as it is in global memory.
uint32_t packed_bytes(const gpu::TensorMapSpec& map) {
  return kChunk * static_cast<uint32_t>(global_bits(map.type)) / static_cast<uint32_t>(shared_bits(map.type));
}

// A row of the box: dimension 0, contiguous on both sides.
struct BoxRow {
  uint64_t global = 0;           // address of the first element, perhaps outside the tensor
  uint32_t image = 0;            // offset in the image
  uint32_t first = 0, last = 0;  // bytes of the row inside the tensor: [first, last)
};

// Calls f(row) for all rows in the order of the image. A store treats the rest of a row's last chunk as inside, as a
// GPU does.
template <class F>
void for_each_row(const BoxCopy& copy, bool is_load, F&& f) {
  const gpu::TensorMapSpec& map = copy.map;
  const auto bits = static_cast<uint32_t>(shared_bits(map.type));
  const uint32_t row_bytes = row_bytes_of(map);
  const int64_t c0 = copy.coordinates[0], end0 = static_cast<int64_t>(map.dims[0]);
  BoxRow inside;
  inside.first = static_cast<uint32_t>(std::clamp<int64_t>(-c0, 0, map.box[0])) * bits / 8;
  inside.last = static_cast<uint32_t>(std::clamp<int64_t>(end0 - c0, 0, map.box[0])) * bits / 8;
  if (!is_load) inside.last = std::min((inside.last + kChunk - 1) / kChunk * kChunk, row_bytes);
  if (inside.first >= inside.last) inside.first = inside.last = 0;
  const uint64_t base = std::bit_cast<uintptr_t>(map.address) + static_cast<uint64_t>(c0 * global_bits(map.type) / 8);

  const bool rows4 = copy.mode == BoxMode::rows4;
  uint32_t counts[gpu::kMaxTensorRank] = {1, 1, 1, 1, 1}, index[gpu::kMaxTensorRank] = {};
  for (int32_t i = 1; i < map.rank; ++i)
    counts[i] = rows4 ? 4 : (map.box[i] + map.element_strides[i] - 1) / map.element_strides[i];
  for (uint32_t image = 0;; image += row_bytes) {
    BoxRow row = inside;
    row.global = base;
    row.image = image;
    for (int32_t i = 1; i < map.rank; ++i) {
      const int64_t c = rows4 ? copy.coordinates[1 + index[1]]
                              : copy.coordinates[i] + int64_t{index[i]} * int64_t{map.element_strides[i]};
      if (c < 0 || c >= static_cast<int64_t>(map.dims[i])) row.first = row.last = 0;
      row.global += static_cast<uint64_t>(c) * map.byte_strides[i];
    }
    f(row);
    int32_t i = 1;
    while (i < map.rank && ++index[i] == counts[i]) index[i++] = 0;
    if (i >= map.rank) return;
  }
}

std::byte* global_at(uint64_t address) { return std::bit_cast<std::byte*>(static_cast<uintptr_t>(address)); }

// The 16 bytes that replace elements beyond the tensor. A GPU uses this NaN for every type.
void fill_chunk(const gpu::TensorMapSpec& map, std::byte* chunk) {
  std::memset(chunk, 0, kChunk);
  if (map.oob_fill == gpu::OobFill::zero) return;
  for (uint32_t i = 0; i < kChunk; i += 2) chunk[i] = std::byte{0xf7}, chunk[i + 1] = std::byte{0x7f};
}

// Copies between a plain chunk and its place in the image: 16 bytes, in two halves if the swizzle splits them.
void to_image(gpu::Swizzle swizzle, const std::byte* chunk, uint32_t address, std::byte* window) {
  const uint32_t place = swizzled(swizzle, address);
  if (place % kChunk == 0) {
    std::memcpy(window + place, chunk, kChunk);
  } else {
    std::memcpy(window + place, chunk, kChunk / 2);
    std::memcpy(window + (place ^ 8), chunk + 8, kChunk / 2);
  }
}
void from_image(gpu::Swizzle swizzle, const std::byte* window, uint32_t address, std::byte* chunk) {
  const uint32_t place = swizzled(swizzle, address);
  if (place % kChunk == 0) {
    std::memcpy(chunk, window + place, kChunk);
  } else {
    std::memcpy(chunk, window + place, kChunk / 2);
    std::memcpy(chunk + 8, window + (place ^ 8), kChunk / 2);
  }
}

// Calls f(global address, plain bytes, count) for the bytes that a store or reduction writes.
template <class F>
void for_each_written(const BoxCopy& copy, const std::byte* window, F&& f) {
  const uint32_t packed = packed_bytes(copy.map);
  for_each_row(copy, false, [&](const BoxRow& row) {
    for (uint32_t at = row.first / kChunk * kChunk; at < row.last; at += kChunk) {
      std::byte chunk[kChunk];
      from_image(copy.map.swizzle, window, copy.shared + row.image + at, chunk);
      if (packed != kChunk) {
        f(row.global + at / kChunk * packed, chunk, packed);
        continue;
      }
      const uint32_t first = std::max(at, row.first), last = std::min(at + kChunk, row.last);
      f(row.global + first, chunk + (first - at), last - first);
    }
  });
}

}  // namespace

uint32_t swizzled(gpu::Swizzle swizzle, uint32_t address) {
  switch (swizzle) {
    case gpu::Swizzle::none: return address;
    case gpu::Swizzle::b32: return address ^ (address >> 3 & 0x10);
    case gpu::Swizzle::b64: return address ^ (address >> 3 & 0x30);
    case gpu::Swizzle::b128: return address ^ (address >> 3 & 0x70);
    case gpu::Swizzle::b128_atom_32b: return address ^ (address >> 2 & 0x60);
    case gpu::Swizzle::b128_atom_32b_flip_8b: return address ^ (address >> 2 & 0x60) ^ (address >> 4 & 0x08);
    case gpu::Swizzle::b128_atom_64b: break;
  }
  return address ^ (address >> 1 & 0x40);
}

Status check(const BoxCopy& copy, int32_t rank, bool is_load) {
  const gpu::TensorMapSpec& map = copy.map;
  if (map.rank != rank)
    return Status::invalid(
        str_cat("the tensor map has rank ", map.rank, ", but the instruction has rank ", rank, ": use equal ranks"));
  if (copy.mode == BoxMode::rows4 && (rank != 2 || map.box[1] != 1))
    return Status::invalid(str_cat("gather4 and scatter4 need a tensor map of rank 2 (", map.rank,
                                   ") whose box has one row (", map.box[1], "): encode such a map"));
  const bool padded = packed_bytes(map) != kChunk;
  if (padded && copy.coordinates[0] % 128 != 0)
    return Status::invalid(str_cat("the first coordinate of a tensor copy (", copy.coordinates[0],
                                   ") must be a multiple of 128 in type ", name_of(map.type),
                                   ": align the coordinate"));
  if (map.type == gpu::TensorType::u4_align16 && !is_load)
    return Status::invalid("tensors of type u4_align16 must not be stored: use another type");
  if (map.type == gpu::TensorType::u6_align16 && is_load && map.swizzle == gpu::Swizzle::b128_atom_64b)
    return Status::invalid(
        "tensors of type u6_align16 must not be loaded with swizzle 128B_atom_64B: use another swizzle");
  const int64_t first = int64_t{copy.coordinates[0]} * global_bits(map.type) / 8;
  if (first % 16 != 0 || int64_t{copy.coordinates[0]} * global_bits(map.type) % 8 != 0)
    return Status::invalid(str_cat("the first coordinate of a tensor copy (", copy.coordinates[0], ", ", first,
                                   " bytes) must be a multiple of 16 bytes: align the coordinate"));
  for (int32_t i = 0; !is_load && i < rank && copy.mode == BoxMode::tile; ++i) {
    if (copy.coordinates[i] < 0)
      return Status::invalid(str_cat("coordinate ", i, " of a tensor store (", copy.coordinates[i],
                                     ") must not be negative: begin the box within the tensor"));
  }
  // The swizzle's pattern follows the absolute address, so that the image need be aligned only to 128 bytes.
  if (copy.shared % 128 != 0)
    return Status::invalid(str_cat("the shared address of a tensor copy (", copy.shared,
                                   ") must be a multiple of 128: align the address"));
  return {};
}

Status check_reduction(Reduction reduction, gpu::TensorType type) {
  using enum gpu::TensorType;
  constexpr const char* names[] = {"add", "min", "max", "inc", "dec", "and", "or", "xor"};
  const bool floating = type == f16 || type == bf16 || type == f32 || type == f64 || type == f32_ftz;
  const bool wide = type == u32 || type == s32 || type == u64 || type == s64;
  bool exists = false;
  switch (reduction) {
    case Reduction::add: exists = floating || wide; break;
    case Reduction::min:
    case Reduction::max: exists = wide || type == f16 || type == bf16; break;
    case Reduction::inc:
    case Reduction::dec: exists = type == u32; break;
    default: exists = wide; break;
  }
  if (!exists)
    return Status::invalid(str_cat("a reduction .", names[static_cast<int>(reduction)],
                                   " must have a supported type, not ", name_of(type), ": use another type"));
  return {};
}

uint32_t image_bytes(const BoxCopy& copy) {
  const gpu::TensorMapSpec& map = copy.map;
  uint32_t bytes = row_bytes_of(map);
  if (copy.mode == BoxMode::rows4) return bytes * 4;
  for (int32_t i = 1; i < map.rank; ++i) bytes *= (map.box[i] + map.element_strides[i] - 1) / map.element_strides[i];
  return bytes;
}

uint32_t transaction_bytes(const BoxCopy& copy) { return image_bytes(copy) / kChunk * packed_bytes(copy.map); }

namespace {

// Loads a row inside the tensor that consists of whole chunks. The swizzle flips the same bits for a whole line.
// Returns false if the swizzle splits chunks.
bool load_whole_row(gpu::Swizzle swizzle, const std::byte* from, uint32_t bytes, uint32_t shared, std::byte* window) {
  constexpr uint32_t kLine = 128;
  if (swizzle == gpu::Swizzle::b128_atom_32b_flip_8b) return false;
  for (uint32_t at = 0; at < bytes;) {
    const uint32_t line = (shared + at) / kLine * kLine, flip = swizzled(swizzle, line) ^ line;
    const uint32_t end = std::min(bytes, line + kLine - shared);
    for (; at < end; at += kChunk) std::memcpy(window + ((shared + at) ^ flip), from + at, kChunk);
  }
  return true;
}

}  // namespace

void load_box(const BoxCopy& copy, std::byte* window) {
  const gpu::Swizzle swizzle = copy.map.swizzle;
  const uint32_t row_bytes = row_bytes_of(copy.map), packed = packed_bytes(copy.map);
  std::byte fill[kChunk];
  fill_chunk(copy.map, fill);
  for_each_row(copy, true, [&](const BoxRow& row) {
    const uint32_t shared = copy.shared + row.image;
    if (packed == kChunk && row.first == 0 && row.last == row_bytes && row_bytes % kChunk == 0 &&
        load_whole_row(swizzle, global_at(row.global), row_bytes, shared, window))
      return;
    for (uint32_t at = 0; at < row_bytes; at += kChunk) {
      if (packed != kChunk) {  // rows lie inside or outside whole; padding becomes 0
        std::byte chunk[kChunk] = {};
        if (at < row.last) std::memcpy(chunk, global_at(row.global + at / kChunk * packed), packed);
        to_image(swizzle, chunk, shared + at, window);
        continue;
      }
      if (row.first <= at && at + kChunk <= row.last) {
        to_image(swizzle, global_at(row.global + at), shared + at, window);
        continue;
      }
      std::byte chunk[kChunk];
      std::memcpy(chunk, fill, kChunk);
      const uint32_t first = std::max(at, row.first), last = std::min(at + kChunk, row.last);
      if (first < last) std::memcpy(chunk + (first - at), global_at(row.global + first), last - first);
      to_image(swizzle, chunk, shared + at, window);
    }
  });
}

void store_box(const BoxCopy& copy, const std::byte* window) {
  for_each_written(copy, window,
                   [](uint64_t to, const std::byte* from, uint32_t bytes) { std::memcpy(global_at(to), from, bytes); });
}

void reduce_box(const BoxCopy& copy, Reduction reduction, const std::byte* window) {
  for_each_written(copy, window, [&](uint64_t to, const std::byte* from, uint32_t bytes) {
    reduce_elements(reduction, copy.map.type, global_at(to), from, bytes);
  });
}

void list_ranges(const BoxCopy& copy, bool is_load, std::vector<Range>* global, std::vector<Range>* shared) {
  if (global != nullptr) {
    const uint32_t packed = packed_bytes(copy.map);
    for_each_row(copy, is_load, [&](const BoxRow& row) {
      if (row.first < row.last)
        append(global, row.global + row.first * packed / kChunk, (row.last - row.first) * packed / kChunk);
    });
  }
  if (shared == nullptr) return;
  // A swizzle stays inside lines of 128 bytes.
  if (is_load && (copy.map.swizzle == gpu::Swizzle::none || image_bytes(copy) % 128 == 0)) {
    append(shared, copy.shared, image_bytes(copy));
    return;
  }
  const uint32_t row_bytes = row_bytes_of(copy.map);
  std::vector<uint32_t> chunks;
  for_each_row(copy, is_load, [&](const BoxRow& row) {
    const uint32_t first = is_load ? 0 : row.first / kChunk * kChunk, last = is_load ? row_bytes : row.last;
    for (uint32_t at = first; at < last; at += kChunk)
      chunks.push_back(swizzled(copy.map.swizzle, copy.shared + row.image + at) / kChunk * kChunk);
  });
  std::sort(chunks.begin(), chunks.end());
  for (const uint32_t chunk : chunks) append(shared, chunk, kChunk);
}

}  // namespace tandem::vgpu::units
