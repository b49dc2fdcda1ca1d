// Tests of boxes with loops over single elements.
#include "vgpu/src/units/box.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <thread>

#include "support/random.h"
#include "vgpu/src/units/numbers.h"
#include "vgpu/src/units/tensor_map.h"

namespace tandem::vgpu::units {
namespace {

using test::Random;

constexpr uint32_t kWindow = 96 * 1024;

// Exchanges bits of the address: bit `to` ^= bit `from`.
uint32_t exchanged(gpu::Swizzle swizzle, uint32_t address) {
  struct Pair {
    uint32_t to, from;
  };
  std::vector<Pair> pairs;
  switch (swizzle) {
    case gpu::Swizzle::none: break;
    case gpu::Swizzle::b32: pairs = {{4, 7}}; break;
    case gpu::Swizzle::b64: pairs = {{4, 7}, {5, 8}}; break;
    case gpu::Swizzle::b128: pairs = {{4, 7}, {5, 8}, {6, 9}}; break;
    case gpu::Swizzle::b128_atom_32b: pairs = {{5, 7}, {6, 8}}; break;
    case gpu::Swizzle::b128_atom_32b_flip_8b: pairs = {{5, 7}, {6, 8}, {3, 7}}; break;
    case gpu::Swizzle::b128_atom_64b: pairs = {{6, 7}}; break;
  }
  uint32_t result = address;
  for (const Pair& pair : pairs) result ^= (address >> pair.from & 1) << pair.to;
  return result;
}

// Calls f(address of the element or 0 outside the tensor, image address of byte 0). A store treats 16 bytes as inside
// if the first of them are.
template <class F>
void for_each_element(const BoxCopy& copy, bool is_load, F&& f) {
  const gpu::TensorMapSpec& map = copy.map;
  const auto bytes = static_cast<uint32_t>(bytes_of(map.type));
  uint32_t linear = 0;
  const auto count = [&](int i) -> int64_t {
    if (i >= map.rank) return 1;
    if (i > 0 && copy.mode == BoxMode::rows4) return 4;
    return i == 0 ? map.box[0] : (map.box[i] + map.element_strides[i] - 1) / map.element_strides[i];
  };
  for (int64_t i4 = 0; i4 < count(4); ++i4)
    for (int64_t i3 = 0; i3 < count(3); ++i3)
      for (int64_t i2 = 0; i2 < count(2); ++i2)
        for (int64_t i1 = 0; i1 < count(1); ++i1)
          for (int64_t i0 = 0; i0 < count(0); ++i0, linear += bytes) {
            const int64_t index[5] = {i0, i1, i2, i3, i4};
            bool inside = true;
            uint64_t address = reinterpret_cast<uint64_t>(map.address);
            for (int i = 0; i < map.rank; ++i) {
              int64_t c = copy.coordinates[i] + index[i] * (i == 0 ? 1 : map.element_strides[i]);
              if (copy.mode == BoxMode::rows4 && i == 1) c = copy.coordinates[1 + i1];
              const int64_t first = i == 0 && !is_load ? c * bytes / 16 * 16 / bytes : c;
              inside = inside && c >= 0 && first < static_cast<int64_t>(map.dims[i]);
              address += static_cast<uint64_t>(c) * (i == 0 ? bytes : map.byte_strides[i]);
            }
            f(inside ? address : 0, copy.shared + linear);
          }
}

struct Sample {
  std::vector<std::byte> tensor;
  BoxCopy copy;
};

Sample sample(Random& random, gpu::TensorType type) {
  Sample s;
  gpu::TensorMapSpec& map = s.copy.map;
  const auto bytes = static_cast<uint32_t>(bytes_of(type));
  map.type = type;
  s.copy.mode = random.chance(0.2) ? BoxMode::rows4 : BoxMode::tile;
  map.rank = s.copy.mode == BoxMode::rows4 ? 2 : static_cast<int32_t>(random.between(1, 5));
  map.swizzle = static_cast<gpu::Swizzle>(random.between(0, 6));
  const uint32_t span = map.swizzle == gpu::Swizzle::none  ? 256
                        : map.swizzle == gpu::Swizzle::b32 ? 32
                        : map.swizzle == gpu::Swizzle::b64 ? 64
                                                           : 128;
  const bool floating = type >= gpu::TensorType::f16;
  map.oob_fill = floating && random.chance(0.5) ? gpu::OobFill::nan : gpu::OobFill::zero;
  uint64_t stride = 0;
  for (int32_t i = 0; i < map.rank; ++i) {
    map.dims[i] = static_cast<uint64_t>(random.between(1, i == 0 ? 80 : 9));
    map.element_strides[i] = static_cast<uint32_t>(random.chance(0.7) ? 1 : random.between(2, 8));
    map.box[i] = static_cast<uint32_t>(random.between(1, i == 0 ? span / 16 : 6)) * (i == 0 ? 16 / bytes : 1);
    if (i == 0) {
      stride = (map.dims[0] * bytes + 15) / 16 * 16;
    } else {
      map.byte_strides[i] = stride + 16 * static_cast<uint64_t>(random.between(0, 2));
      stride = map.byte_strides[i] * map.dims[i];
    }
    s.copy.coordinates[i] = static_cast<int32_t>(random.between(-12, static_cast<int64_t>(map.dims[i]) + 3));
    if (i == 0) s.copy.coordinates[i] -= s.copy.coordinates[i] % static_cast<int32_t>(16 / bytes);
  }
  if (s.copy.mode == BoxMode::rows4) {
    map.box[1] = 1;
    for (int i = 1; i < 5; ++i)
      s.copy.coordinates[i] = static_cast<int32_t>(random.between(-2, static_cast<int64_t>(map.dims[1]) + 1));
  }
  s.tensor.resize(stride + 64);
  for (std::byte& b : s.tensor) b = static_cast<std::byte>(random.next());
  map.address = reinterpret_cast<void*>((reinterpret_cast<uintptr_t>(s.tensor.data()) + 15) / 16 * 16);
  s.copy.shared = 0x400 + 128 * static_cast<uint32_t>(random.between(0, 20));
  return s;
}

std::vector<std::byte> random_window(Random& random) {
  std::vector<std::byte> window(kWindow);
  for (std::byte& b : window) b = static_cast<std::byte>(random.next());
  return window;
}

constexpr gpu::TensorType kTypes[] = {gpu::TensorType::u8,  gpu::TensorType::bf16, gpu::TensorType::f16,
                                      gpu::TensorType::f32, gpu::TensorType::s32,  gpu::TensorType::f64};

TEST(Box, LoadsElementByElement) {
  Random random(1);
  for (int i = 0; i < 600; ++i) {
    const Sample s = sample(random, kTypes[i % 6]);
    const Status status = check(s.copy, s.copy.map.rank, true);
    ASSERT_TRUE(status.ok()) << status.message;
    const auto bytes = static_cast<uint32_t>(bytes_of(s.copy.map.type));
    std::vector<std::byte> window = random_window(random), want = window;
    uint32_t total = 0;
    for_each_element(s.copy, true, [&](uint64_t address, uint32_t image) {
      total += bytes;
      for (uint32_t b = 0; b < bytes; ++b) {
        std::byte& to = want[exchanged(s.copy.map.swizzle, image + b)];
        if (address != 0) {
          to = reinterpret_cast<const std::byte*>(address)[b];
        } else {
          to = std::byte{s.copy.map.oob_fill == gpu::OobFill::zero ? uint8_t{0}
                         : b % 2 == 1                              ? uint8_t{0x7f}
                                                                   : uint8_t{0xf7}};
        }
      }
    });
    load_box(s.copy, window.data());
    ASSERT_EQ(image_bytes(s.copy), total);
    ASSERT_TRUE(window == want) << "sample " << i;
  }
}

// As on hardware, the other coordinates may have any value.
TEST(Box, TakesOnlyAFirstCoordinateOfWholeChunks) {
  Random random(9);
  for (const gpu::TensorType type : kTypes) {
    Sample s = sample(random, type);
    const int32_t step = 16 / bytes_of(type);
    for (int32_t c = -2 * step; c <= 2 * step; ++c) {
      s.copy.coordinates[0] = c;
      EXPECT_EQ(check(s.copy, s.copy.map.rank, true).ok(), c % step == 0) << c;
      const bool before =
          s.copy.mode == BoxMode::tile &&
          std::any_of(s.copy.coordinates, s.copy.coordinates + s.copy.map.rank, [](int32_t x) { return x < 0; });
      EXPECT_EQ(check(s.copy, s.copy.map.rank, false).ok(), c % step == 0 && !before) << c;
    }
  }
}

TEST(Box, StoresElementByElement) {
  Random random(2);
  for (int i = 0; i < 600; ++i) {
    Sample s = sample(random, kTypes[i % 6]);
    const auto bytes = static_cast<uint32_t>(bytes_of(s.copy.map.type));
    const std::vector<std::byte> window = random_window(random);
    std::vector<std::byte> want = s.tensor;
    const auto origin = reinterpret_cast<uint64_t>(s.tensor.data());
    for_each_element(s.copy, false, [&](uint64_t address, uint32_t image) {
      for (uint32_t b = 0; address != 0 && b < bytes; ++b)
        want[address - origin + b] = window[exchanged(s.copy.map.swizzle, image + b)];
    });
    store_box(s.copy, window.data());
    ASSERT_TRUE(s.tensor == want) << "sample " << i;
  }
}

// Returns the bytes of sorted or unsorted ranges. No range begins where the preceding range ends.
std::vector<uint64_t> bytes_in(const std::vector<Range>& ranges) {
  std::vector<uint64_t> bytes;
  for (size_t i = 0; i < ranges.size(); ++i) {
    const uint64_t end = i == 0 ? 0 : ranges[i - 1].address + ranges[i - 1].bytes;
    EXPECT_NE(end, ranges[i].address);
    for (uint32_t b = 0; b < ranges[i].bytes; ++b) bytes.push_back(ranges[i].address + b);
  }
  std::sort(bytes.begin(), bytes.end());
  bytes.erase(std::unique(bytes.begin(), bytes.end()), bytes.end());  // gather4 may name a row twice
  return bytes;
}

TEST(Box, ListsWhatItTouches) {
  Random random(3);
  for (int i = 0; i < 300; ++i) {
    const Sample s = sample(random, kTypes[i % 6]);
    const auto bytes = static_cast<uint32_t>(bytes_of(s.copy.map.type));
    std::vector<uint64_t> global, image, written, stored;
    for_each_element(s.copy, true, [&](uint64_t address, uint32_t at) {
      for (uint32_t b = 0; b < bytes; ++b) {
        image.push_back(exchanged(s.copy.map.swizzle, at + b));
        if (address != 0) global.push_back(address + b);
      }
    });
    for_each_element(s.copy, false, [&](uint64_t address, uint32_t at) {
      for (uint32_t b = 0; address != 0 && b < bytes; ++b) {
        const uint32_t place = exchanged(s.copy.map.swizzle, at + b);
        written.push_back(address + b);
        for (uint32_t other = 0; other < 16; ++other) stored.push_back(place / 16 * 16 + other);  // whole chunks
      }
    });
    for (auto* list : {&global, &image, &written, &stored}) {
      std::sort(list->begin(), list->end());
      list->erase(std::unique(list->begin(), list->end()), list->end());
    }
    std::vector<Range> global_ranges, shared_ranges, written_ranges, stored_ranges;
    list_ranges(s.copy, true, &global_ranges, nullptr);
    ASSERT_EQ(bytes_in(global_ranges), global);
    list_ranges(s.copy, true, nullptr, &shared_ranges);
    ASSERT_EQ(bytes_in(shared_ranges), image);
    ASSERT_TRUE(image_bytes(s.copy) % 128 != 0 || shared_ranges.size() == 1);
    list_ranges(s.copy, false, nullptr, &stored_ranges);
    ASSERT_EQ(bytes_in(stored_ranges), stored);
    list_ranges(s.copy, false, &written_ranges, nullptr);
    ASSERT_EQ(bytes_in(written_ranges), written);
  }
}

// Applies a reduction to an element, from its definition.
template <class T>
T reduced(Reduction reduction, T old, T x) {
  using U = std::make_unsigned_t<T>;
  switch (reduction) {
    case Reduction::add: return static_cast<T>(static_cast<U>(old) + static_cast<U>(x));
    case Reduction::min: return x < old ? x : old;
    case Reduction::max: return x > old ? x : old;
    case Reduction::inc: return static_cast<U>(old) >= static_cast<U>(x) ? T{0} : static_cast<T>(old + 1);
    case Reduction::dec: return old == 0 || static_cast<U>(old) > static_cast<U>(x) ? x : static_cast<T>(old - 1);
    case Reduction::bit_and: return old & x;
    case Reduction::bit_or: return old | x;
    default: return old ^ x;
  }
}

uint64_t expected_reduction(Reduction reduction, gpu::TensorType type, uint64_t old, uint64_t x) {
  const auto flushed = [](uint32_t u) {
    float f;
    u = (u & 0x7f800000) == 0 ? u & 0x80000000 : u;
    std::memcpy(&f, &u, sizeof f);
    return f;
  };
  switch (type) {
    case gpu::TensorType::u32: return reduced(reduction, static_cast<uint32_t>(old), static_cast<uint32_t>(x));
    case gpu::TensorType::s32:
      return static_cast<uint32_t>(reduced(reduction, static_cast<int32_t>(old), static_cast<int32_t>(x)));
    case gpu::TensorType::u64: return reduced(reduction, old, x);
    case gpu::TensorType::s64:
      return static_cast<uint64_t>(reduced(reduction, static_cast<int64_t>(old), static_cast<int64_t>(x)));
    case gpu::TensorType::f64: {
      double a, b;
      std::memcpy(&a, &old, 8), std::memcpy(&b, &x, 8);
      a += b;
      std::memcpy(&old, &a, 8);
      return old;
    }
    case gpu::TensorType::f16:
    case gpu::TensorType::bf16: {
      const Format format = type == gpu::TensorType::f16 ? Format::f16 : Format::bf16;
      const double a = decode(static_cast<uint32_t>(old), format), b = decode(static_cast<uint32_t>(x), format);
      if (reduction == Reduction::add) return encode(static_cast<float>(a + b), format);
      if (std::isnan(a) || std::isnan(b)) return std::isnan(a) && std::isnan(b) ? 0x7fff : std::isnan(a) ? x : old;
      const bool old_first = a < b || (a == b && std::signbit(a));
      return old_first == (reduction == Reduction::min) ? old : x;
    }
    default: {
      const float sum = flushed(static_cast<uint32_t>(old)) + flushed(static_cast<uint32_t>(x));
      uint32_t u;
      std::memcpy(&u, &sum, 4);
      return std::isnan(sum) ? 0x7fffffff : (u & 0x7f800000) == 0 ? u & 0x80000000 : u;
    }
  }
}

TEST(Box, ReducesElementByElement) {
  Random random(4);
  int reductions = 0;
  for (int t = 0; t < 13; ++t)
    for (int r = 0; r < 8; ++r) {
      const auto type = static_cast<gpu::TensorType>(t);
      const auto reduction = static_cast<Reduction>(r);
      if (!check_reduction(reduction, type).ok()) continue;
      ++reductions;
      for (int i = 0; i < 10; ++i) {
        Sample s = sample(random, type);
        const auto bytes = static_cast<uint32_t>(bytes_of(type));
        std::vector<std::byte> window = random_window(random), want = s.tensor;
        const auto origin = reinterpret_cast<uint64_t>(s.tensor.data());
        for_each_element(s.copy, false, [&](uint64_t address, uint32_t image) {
          if (address == 0) return;
          uint64_t old = 0, x = 0;
          std::memcpy(&old, want.data() + (address - origin), bytes);
          for (uint32_t b = 0; b < bytes; ++b)
            x |= static_cast<uint64_t>(window[exchanged(s.copy.map.swizzle, image + b)]) << (8 * b);
          const uint64_t result = expected_reduction(reduction, type, old, x);
          std::memcpy(want.data() + (address - origin), &result, bytes);
        });
        reduce_box(s.copy, reduction, window.data());
        ASSERT_TRUE(s.tensor == want) << name_of(type) << " reduction " << r;
      }
    }
  EXPECT_EQ(reductions, 4 * 6 + 2 + 2 * 3 + 3);  // integers, inc and dec of u32, f16 and bf16, f32 f64 f32_ftz
}

TEST(Box, ReductionsOfManyThreadsAddUp) {
  alignas(16) uint32_t sums[64] = {};
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t)
    threads.emplace_back([&] {
      uint32_t ones[64];
      for (uint32_t& one : ones) one = 1;
      for (int i = 0; i < 500; ++i) reduce_elements(Reduction::add, gpu::TensorType::u32, sums, ones, sizeof sums);
    });
  for (std::thread& thread : threads) thread.join();
  for (const uint32_t sum : sums) ASSERT_EQ(sum, 2000u);
}

TEST(Box, RefusesWhatCannotBeExecuted) {
  Random random(5);
  Sample s = sample(random, gpu::TensorType::f32);
  s.copy.mode = BoxMode::tile;
  s.copy.map.rank = 2;
  EXPECT_NE(check(s.copy, 3, true).message.find("rank 2"), std::string::npos);
  s.copy.shared = 0x440;
  EXPECT_NE(check(s.copy, 2, true).message.find("1088"), std::string::npos);
  s.copy.shared = 0x480;
  EXPECT_TRUE(check(s.copy, 2, true).ok());
  s.copy.mode = BoxMode::rows4;
  s.copy.map.box[1] = 2;
  EXPECT_NE(check(s.copy, 2, true).message.find("gather4"), std::string::npos);
  EXPECT_FALSE(check_reduction(Reduction::inc, gpu::TensorType::f32).ok());
  EXPECT_FALSE(check_reduction(Reduction::add, gpu::TensorType::u8).ok());
}

}  // namespace
}  // namespace tandem::vgpu::units
