// PTX ISA, "cp.async.bulk.tensor", "cp.reduce.async.bulk.tensor": boxes of tensors of one to five dimensions.
#include <cstring>

#include "base/text.h"
#include "support/random.h"
#include "vgpu/src/units/tensor_map.h"
#include "vgpu/tests/instructions/bench.h"

namespace tandem::test {
namespace {

using u32 = uint32_t;
using u64 = uint64_t;

// Returns the position of a byte of shared memory under a swizzle, as cuTensorMapEncodeTiled defines it.
u32 exchanged(gpu::Swizzle swizzle, u32 a) {
  switch (swizzle) {
    case gpu::Swizzle::none: return a;
    case gpu::Swizzle::b32: return a ^ (a >> 7 & 1) << 4;
    case gpu::Swizzle::b64: return a ^ (a >> 7 & 3) << 4;
    case gpu::Swizzle::b128: return a ^ (a >> 7 & 7) << 4;
    case gpu::Swizzle::b128_atom_32b: return a ^ (a >> 7 & 3) << 5;
    case gpu::Swizzle::b128_atom_32b_flip_8b: return a ^ (a >> 7 & 3) << 5 ^ (a >> 7 & 1) << 3;
    default: return a ^ (a >> 7 & 1) << 6;
  }
}

struct Tensor {
  gpu::TensorMapSpec spec;
  size_t bytes = 0;
};

// Returns a tensor with gaps between its rows.
Tensor tensor_of(int rank, gpu::TensorType type, gpu::Swizzle swizzle, const std::vector<u64>& dims,
                 const std::vector<u32>& box) {
  Tensor t;
  t.spec.rank = rank, t.spec.type = type, t.spec.swizzle = swizzle;
  u64 stride = static_cast<u64>(vgpu::units::bytes_of(type));
  for (int i = 0; i < rank; ++i) {
    t.spec.dims[i] = dims[static_cast<size_t>(i)];
    t.spec.box[i] = box[static_cast<size_t>(i)];
    t.spec.byte_strides[i] = i == 0 ? stride : (stride + 15) / 16 * 16 + 16;
    stride = t.spec.byte_strides[i] * t.spec.dims[i];
  }
  t.bytes = stride + 16;
  return t;
}

// The first coordinate of a copy must be a multiple of 16 bytes, below zero too. Other coordinates may be any. Elements
// have four bytes. A store must not begin before the tensor.
constexpr int kInside[5] = {8, 3, 2, 1, 1}, kOutside[5] = {-4, -2, 3, -1, 2}, kBeyond[5] = {28, 7, 3, 3, 2};

// Calls f(byte offset in the tensor or -1 outside, byte offset in the box) for every byte.
template <class F>
void for_each_byte(const gpu::TensorMapSpec& spec, const int* coordinates, bool is_load, F&& f) {
  const int bytes = vgpu::units::bytes_of(spec.type);
  int64_t count = 1;
  int64_t counts[5] = {1, 1, 1, 1, 1};
  for (int i = 0; i < spec.rank; ++i) {
    const u32 step = i == 0 ? 1 : spec.element_strides[i];
    counts[i] = (spec.box[i] + step - 1) / step;
    count *= counts[i];
  }
  for (int64_t n = 0; n < count; ++n) {
    int64_t rest = n, offset = 0;
    bool inside = true;
    for (int i = 0; i < spec.rank; ++i) {
      const int64_t c = coordinates[i] + rest % counts[i] * (i == 0 ? 1 : spec.element_strides[i]);
      rest /= counts[i];
      // A GPU stores 16 bytes if the first of them are inside.
      const int64_t first = i == 0 && !is_load ? c * bytes / 16 * 16 / bytes : c;
      inside = inside && c >= 0 && first < static_cast<int64_t>(spec.dims[i]);
      offset += c * static_cast<int64_t>(spec.byte_strides[i]);
    }
    for (int b = 0; b < bytes; ++b) f(inside ? offset + b : -1, static_cast<u32>(n * bytes + b));
  }
}

std::vector<std::byte> random_bytes(uint64_t seed, size_t count) {
  Random random(seed);
  std::vector<std::byte> bytes(count);
  for (std::byte& b : bytes) b = static_cast<std::byte>(random.next());
  return bytes;
}

constexpr u32 kImage = 16384;

std::string coordinates_text(const int* coordinates, int rank) {
  std::string text;
  for (int i = 0; i < rank; ++i)
    text += "mov.b32 c" + std::to_string(i) + ", " + std::to_string(coordinates[i]) + ";\n";
  return text;
}
std::string coordinates_operand(int rank) {
  std::string text = "[map, {";
  for (int i = 0; i < rank; ++i) text += (i == 0 ? "c" : ", c") + std::to_string(i);
  return text + "}]";
}

constexpr const char* kProlog = R"(
  .reg .b32 t, x, y, z, at, bar, rank, c<5>;
  .reg .b64 in, out, map, wide, policy;
  .reg .b32 v<4>;
  .reg .pred p, q;
  .shared .align 8 .b64 barrier;
  mov.u32 t, %tid.x;
  mov.u32 at, smem;
  mov.u32 bar, barrier;
  mov.u32 rank, %cluster_ctarank;
  setp.eq.u32 p, t, 0;
  mov.b64 map, map0;
  cvta.param.u64 map, map;
)";
// Processes 16 bytes of the image at a time, by 128 threads.
std::string image_loop(const std::string& label, const std::string& body) {
  return "mul.lo.u32 x, t, 16;\n" + label + ":\nadd.u32 y, at, x;\ncvt.u64.u32 wide, x;\n" + body +
         "add.u32 x, x, 2048;\nsetp.lt.u32 q, x, " + std::to_string(kImage) + ";\n@q bra " + label + ";\n";
}

// p1: the image before and after the copy.
BenchKernel load_kernel(const Tensor& t, const int* coordinates, const std::string& name, u32 box_bytes) {
  BenchKernel kernel;
  kernel.body = std::string(kProlog) + "ld.param.u64 out, [p1];\n" +
                image_loop("fill",
                           "add.s64 wide, out, wide;\nld.global.v4.b32 {v0, v1, v2, v3}, [wide];\nst.shared.v4.b32 "
                           "[y], {v0, v1, v2, v3};\n") +
                "fence.proxy.async.shared::cta;\n@p mbarrier.init.shared::cta.b64 [bar], "
                "1;\nfence.mbarrier_init.release.cluster;\nbar.sync 0;\n@!p bra wait;\n"
                "prefetch.tensormap [map];\nmbarrier.arrive.expect_tx.shared::cta.b64 _, [bar], " +
                std::to_string(box_bytes) + ";\n" + coordinates_text(coordinates, t.spec.rank) +
                "mov.u64 policy, 0x1000000000000000;\n" + name +
                "\nwait:\nmbarrier.try_wait.parity.shared::cta.b64 q, [bar], 0;\n@!q bra wait;\n" +
                image_loop("drain",
                           "add.s64 wide, out, wide;\nld.shared.v4.b32 {v0, v1, v2, v3}, [y];\nst.global.v4.b32 "
                           "[wide], {v0, v1, v2, v3};\n");
  kernel.block = {128, 1, 1};
  kernel.dynamic_smem_bytes = kImage;
  kernel.memory = {Memory::in(random_bytes(1, t.bytes)), Memory::inout(random_bytes(2, kImage))};
  kernel.maps = {{t.spec, 0, 0}};
  return kernel;
}

u32 box_bytes(const gpu::TensorMapSpec& spec) {
  u32 bytes = 0;
  const int origin[5] = {};
  for_each_byte(spec, origin, true, [&](int64_t, u32) { ++bytes; });
  return bytes;
}

// The fill of elements beyond the tensor.
std::byte filled(const gpu::TensorMapSpec& spec, u32 byte) {
  if (spec.oob_fill == gpu::OobFill::zero) return std::byte{0};
  const auto bytes = static_cast<u32>(vgpu::units::bytes_of(spec.type));
  return byte % bytes == bytes - 1 ? std::byte{0x7f} : std::byte{0xff};
}

// PTX does not specify the NaN: it is replaced by the NaN of `filled`.
void one_nan(const gpu::TensorMapSpec& spec, std::vector<std::byte>* image, u32 at) {
  const auto bytes = static_cast<u32>(vgpu::units::bytes_of(spec.type));
  u64 code = 0;
  for (u32 i = 0; i < bytes; ++i) code |= std::to_integer<u64>((*image)[at + i]) << (8 * i);
  const int mantissa = spec.type == gpu::TensorType::bf16 ? 7 : bytes == 2 ? 10 : bytes == 4 ? 23 : 52;
  const u64 infinity = ((u64{1} << (8 * bytes - 1)) - 1) >> mantissa << mantissa;
  if ((code & (infinity | (infinity - 1))) <= infinity) return;
  for (u32 i = 0; i < bytes; ++i) (*image)[at + i] = filled(spec, i);
}

void try_load(const Tensor& t, const int* coordinates, const std::string& form = "", Needs needs = Needs::any) {
  const std::string dims = std::to_string(t.spec.rank) + "d";
  const std::string instruction = form.empty() ? "cp.async.bulk.tensor." + dims +
                                                     ".shared::cluster.global.mbarrier::complete_tx::bytes [at], " +
                                                     coordinates_operand(t.spec.rank) + ", [bar];"
                                               : form;
  SCOPED_TRACE(instruction);
  BenchKernel kernel = load_kernel(t, coordinates, instruction, box_bytes(t.spec));
  kernel.needs = needs;
  const auto bytes = static_cast<u32>(vgpu::units::bytes_of(t.spec.type));
  on_each(kernel, [&](const Bench&, const BenchKernel& done) {
    std::vector<std::byte> want = kernel.memory[1].bytes, got = done.memory[1].bytes;
    for_each_byte(t.spec, coordinates, true, [&](int64_t from, u32 to) {
      want[exchanged(t.spec.swizzle, to)] =
          from >= 0 ? kernel.memory[0].bytes[static_cast<size_t>(from)] : filled(t.spec, to);
      if (from < 0 && to % bytes == 0 && t.spec.oob_fill == gpu::OobFill::nan)
        one_nan(t.spec, &got, exchanged(t.spec.swizzle, to));
    });
    size_t wrong = 0, first = 0;
    for (size_t i = 0; i < want.size(); ++i)
      if (want[i] != got[i] && wrong++ == 0) first = i;
    EXPECT_EQ(wrong, 0u) << "bytes of the image differ, first at " << first;
  });
}

TEST(TensorCopy, LoadsEveryRank) {
  const std::vector<u64> dims = {37, 9, 5, 4, 3};
  const std::vector<u32> box = {16, 5, 4, 3, 2};
  for (int rank = 1; rank <= 5; ++rank)
    for (const int* coordinates : {kInside, kOutside})
      try_load(tensor_of(rank, gpu::TensorType::f32, gpu::Swizzle::none, dims, box), coordinates);
}

TEST(TensorCopy, LoadsEverySwizzle) {
  const int coordinates[2] = {-8, 5};
  for (int s = 0; s < 7; ++s) {
    const u32 row = s == 1 ? 32 : s == 2 ? 64 : 128;
    // The rows are as wide as the swizzle.
    const Tensor t = tensor_of(2, gpu::TensorType::bf16, static_cast<gpu::Swizzle>(s), {100, 50}, {row / 2, 40});
    try_load(t, coordinates, "", s < 4 ? Needs::any : Needs::blackwell);
  }
}

TEST(TensorCopy, LoadsEveryTypeAndFill) {
  for (int type = 0; type < 13; ++type) {
    const auto tensor_type = static_cast<gpu::TensorType>(type);
    // Types that change the copied values have a separate test.
    if (tensor_type == gpu::TensorType::f32_ftz || tensor_type == gpu::TensorType::tf32 ||
        tensor_type == gpu::TensorType::tf32_ftz)
      continue;
    Tensor t = tensor_of(2, tensor_type, gpu::Swizzle::none, {40, 20}, {32, 8});
    const int coordinates[2] = {-16 / vgpu::units::bytes_of(tensor_type), -2};
    try_load(t, coordinates);
    if (tensor_type < gpu::TensorType::f16) continue;
    t.spec.oob_fill = gpu::OobFill::nan;
    try_load(t, coordinates);
  }
}

// The last 16 bytes of a row belong to the tensor in part: zeros begin at the first element beyond it. A store writes
// all 16 bytes. The bytes between the rows are random here, so that a load of all 16 bytes fails.
TEST(TensorCopy, LoadsRowsThatEndInsideAChunk) {
  for (const gpu::TensorType type : {gpu::TensorType::u8, gpu::TensorType::bf16, gpu::TensorType::f32}) {
    const auto bytes = static_cast<u32>(vgpu::units::bytes_of(type)), chunk = 16 / bytes;
    struct Case {
      u32 end;    // bytes of the tensor's rows
      int first;  // bytes of the box
    };
    for (const Case& c : {Case{chunk + chunk / 2, 0}, Case{chunk + 1, static_cast<int>(chunk)},
                          Case{2 * chunk - 1, -static_cast<int>(chunk)}})
      for (const gpu::Swizzle swizzle : {gpu::Swizzle::none, gpu::Swizzle::b128})
        for (int rank = 1; rank <= 3; ++rank) {
          const int coordinates[3] = {c.first, 2, -1};
          try_load(tensor_of(rank, type, swizzle, {c.end, 6, 3}, {128 / bytes, 5, 3}), coordinates);
        }
  }
}

TEST(TensorCopy, SkipsElements) {
  const int coordinates[3] = {8, -3, 1};
  Tensor t = tensor_of(3, gpu::TensorType::bf16, gpu::Swizzle::none, {64, 30, 9}, {32, 16, 5});
  t.spec.element_strides[1] = 3, t.spec.element_strides[2] = 2;
  try_load(t, coordinates);
}

TEST(TensorCopy, OtherSpellings) {
  const int coordinates[2] = {8, 1};
  const Tensor t = tensor_of(2, gpu::TensorType::bf16, gpu::Swizzle::b128, {80, 20}, {64, 8});
  try_load(t, coordinates,
           "cp.async.bulk.tensor.2d.shared::cta.global.mbarrier::complete_tx::bytes [at], [map, {c0, c1}], [bar];");
  try_load(
      t, coordinates,
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [at], [map, {c0, c1}], [bar];");
  try_load(t, coordinates,
           "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [at], [map, "
           "{c0, c1}], [bar], policy;");
  try_load(t, coordinates,
           "cp.async.bulk.prefetch.tensor.2d.L2.global [map, {c0, c1}];\n"
           "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [at], [map, {c0, c1}], [bar];");
}

// Uses another spelling of the instruction, in a cluster of one block.
TEST(TensorCopy, FourAndFiveDimensions) {
  const int coordinates[5] = {8, -3, 2, 1, 1};
  for (const int rank : {2, 4, 5}) {
    const Tensor t = tensor_of(rank, gpu::TensorType::f32, gpu::Swizzle::none, {37, 9, 5, 4, 3}, {16, 5, 4, 3, 2});
    const std::string name = str_cat("cp.async.bulk.tensor.", rank, "d"), at = " [at], " + coordinates_operand(rank);
    const std::string complete = ".mbarrier::complete_tx::bytes";
    const std::string mask = "{\n.reg .b16 mask;\nmov.b16 mask, 1;\n";
    try_load(t, coordinates, name + ".shared::cluster.global" + complete + ".L2::cache_hint" + at + ", [bar], policy;");
    try_load(t, coordinates,
             str_cat("cp.async.bulk.prefetch.tensor.", rank, "d.L2.global ", coordinates_operand(rank), ";\n", mask,
                     name, ".shared::cluster.global", complete, ".multicast::cluster.L2::cache_hint", at,
                     ", [bar], mask, policy;\n}"));
    try_load(t, coordinates,
             name + ".cta_group::2.shared::cluster.global" + complete + ".L2::cache_hint" + at + ", [bar], policy;",
             Needs::blackwell);
    try_load(t, coordinates,
             mask + name + ".shared::cluster.global.tile" + complete + ".cta_group::2.multicast::cluster" + at +
                 ", [bar], mask;\n}",
             Needs::blackwell);
  }
}

// p1: the tensor before and after the copy.
void try_store(const Tensor& t, const int* coordinates, const std::string& instruction,
               u32 (*reduce)(u32, u32) = nullptr) {
  SCOPED_TRACE(instruction);
  BenchKernel kernel;
  kernel.body = std::string(kProlog) + "ld.param.u64 in, [p0];\n" +
                image_loop("fill",
                           "add.s64 wide, in, wide;\nld.global.v4.b32 {v0, v1, v2, v3}, [wide];\nst.shared.v4.b32 [y], "
                           "{v0, v1, v2, v3};\n") +
                "fence.proxy.async.shared::cta;\nbar.sync 0;\n@!p bra done;\n" +
                coordinates_text(coordinates, t.spec.rank) + "mov.u64 policy, 0x1000000000000000;\n" + instruction +
                "\ncp.async.bulk.commit_group;\ncp.async.bulk.wait_group 0;\ndone:";
  kernel.block = {128, 1, 1};
  kernel.dynamic_smem_bytes = kImage;
  kernel.memory = {Memory::in(random_bytes(3, kImage)), Memory::inout(random_bytes(4, t.bytes))};
  kernel.maps = {{t.spec, 1, 0}};
  on_each(kernel, [&](const Bench&, const BenchKernel& done) {
    std::vector<std::byte> want = kernel.memory[1].bytes;
    const auto& image = kernel.memory[0].bytes;
    for_each_byte(t.spec, coordinates, false, [&](int64_t to, u32 from) {
      if (to < 0) return;
      if (reduce == nullptr) {
        want[static_cast<size_t>(to)] = image[exchanged(t.spec.swizzle, from)];
      } else if (from % 4 == 0) {
        u32 a, b = 0;
        std::memcpy(&a, &want[static_cast<size_t>(to)], 4);
        for (u32 i = 0; i < 4; ++i) b |= static_cast<u32>(image[exchanged(t.spec.swizzle, from + i)]) << (8 * i);
        a = reduce(a, b);
        std::memcpy(&want[static_cast<size_t>(to)], &a, 4);
      }
    });
    EXPECT_TRUE(want == done.memory[1].bytes);
  });
}

std::string store_text(int rank, const std::string& tail = "") {
  return "cp.async.bulk.tensor." + std::to_string(rank) + "d.global.shared::cta.bulk_group" + tail + " " +
         coordinates_operand(rank) + ", [at]" + (tail.empty() ? ";" : ", policy;");
}

TEST(TensorCopy, StoresEveryRank) {
  const std::vector<u64> dims = {37, 9, 5, 4, 3};
  const std::vector<u32> box = {16, 5, 4, 3, 2};
  for (int rank = 1; rank <= 5; ++rank)
    for (const int* coordinates : {kInside, kBeyond})
      try_store(tensor_of(rank, gpu::TensorType::f32, gpu::Swizzle::none, dims, box), coordinates, store_text(rank));
  try_store(tensor_of(5, gpu::TensorType::f32, gpu::Swizzle::none, dims, box), kInside,
            "cp.async.bulk.tensor.5d.global.shared::cta.tile.bulk_group.L2::cache_hint " + coordinates_operand(5) +
                ", [at], policy;");
  for (const int rank : {4, 5})
    try_store(tensor_of(rank, gpu::TensorType::u32, gpu::Swizzle::none, dims, box), kBeyond,
              str_cat("cp.reduce.async.bulk.tensor.", rank, "d.global.shared::cta.add.bulk_group ",
                      coordinates_operand(rank), ", [at];"),
              [](u32 a, u32 b) { return a + b; });
}

TEST(TensorCopy, StoresEverySwizzle) {
  const int coordinates[2] = {72, 4};
  for (int s = 0; s < 4; ++s) {
    const u32 row = s == 1 ? 32 : s == 2 ? 64 : 128;
    try_store(tensor_of(2, gpu::TensorType::bf16, static_cast<gpu::Swizzle>(s), {100, 50}, {row / 2, 40}), coordinates,
              store_text(2));
  }
  try_store(tensor_of(2, gpu::TensorType::bf16, gpu::Swizzle::b128, {100, 50}, {64, 40}), coordinates,
            store_text(2, ".L2::cache_hint"));
}

TEST(TensorCopy, Reduces) {
  const int coordinates[3] = {40, 4, 1};
  struct Case {
    const char* name;
    u32 (*f)(u32, u32);
  };
  for (const Case& c :
       {Case{"add", [](u32 a, u32 b) { return a + b; }}, Case{"min", [](u32 a, u32 b) { return a < b ? a : b; }},
        Case{"max", [](u32 a, u32 b) { return a > b ? a : b; }},
        Case{"inc", [](u32 a, u32 b) { return a >= b ? 0 : a + 1; }},
        Case{"dec", [](u32 a, u32 b) { return a == 0 || a > b ? b : a - 1; }},
        Case{"and", [](u32 a, u32 b) { return a & b; }}, Case{"or", [](u32 a, u32 b) { return a | b; }},
        Case{"xor", [](u32 a, u32 b) { return a ^ b; }}})
    try_store(tensor_of(3, gpu::TensorType::u32, gpu::Swizzle::b64, {50, 20, 4}, {16, 12, 2}), coordinates,
              std::string("cp.reduce.async.bulk.tensor.3d.global.shared::cta.") + c.name +
                  ".bulk_group [map, {c0, c1, c2}], [at];",
              c.f);
  try_store(tensor_of(3, gpu::TensorType::u32, gpu::Swizzle::none, {50, 20, 4}, {16, 12, 2}), coordinates,
            "cp.reduce.async.bulk.tensor.3d.global.shared::cta.add.tile.bulk_group.L2::cache_hint [map, {c0, c1, c2}], "
            "[at], policy;",
            [](u32 a, u32 b) { return a + b; });
}

// Copies four rows that are not adjacent.
TEST(TensorCopy, GathersAndScattersRows) {
  Tensor t = tensor_of(2, gpu::TensorType::bf16, gpu::Swizzle::b128, {80, 30}, {64, 1});
  const int coordinates[5] = {8, 21, -1, 3, 21};
  std::string set;
  for (int i = 0; i < 5; ++i) set += "mov.b32 c" + std::to_string(i) + ", " + std::to_string(coordinates[i]) + ";\n";
  BenchKernel load =
      load_kernel(t, coordinates,
                  set +
                      "cp.async.bulk.tensor.2d.shared::cta.global.tile::gather4.mbarrier::complete_tx::bytes "
                      "[at], [map, {c0, c1, c2, c3, c4}], [bar];",
                  512);
  load.needs = Needs::blackwell;
  on_each(load, [&](const Bench&, const BenchKernel& done) {
    std::vector<std::byte> want = load.memory[1].bytes;
    for (u32 row = 0; row < 4; ++row) {
      const int part[2] = {coordinates[0], coordinates[1 + row]};
      for_each_byte(t.spec, part, true, [&](int64_t from, u32 to) {
        want[exchanged(t.spec.swizzle, 128 * row + to)] =
            from >= 0 ? load.memory[0].bytes[static_cast<size_t>(from)] : std::byte{0};
      });
    }
    EXPECT_TRUE(want == done.memory[1].bytes);
  });
}

// A block's copy writes to other blocks and signals their barriers.
TEST(TensorCopy, Multicast) {
  const Tensor t = tensor_of(2, gpu::TensorType::bf16, gpu::Swizzle::b128, {64, 40}, {64, 16});
  BenchKernel kernel;
  kernel.body = std::string(kProlog) + R"(
    ld.param.u64 out, [p1];
    @p mbarrier.init.shared::cta.b64 [bar], 1;
    fence.mbarrier_init.release.cluster;
    @p mbarrier.arrive.expect_tx.shared::cta.b64 _, [bar], 4096;
    barrier.cluster.arrive.aligned;
    barrier.cluster.wait.aligned;
    // Each block loads 16 rows for both: its own at 0, the other's behind it.
    .reg .b16 mask;
    mov.b16 mask, 3;
    mul.lo.u32 c1, rank, 16;
    mad.lo.u32 x, rank, 2048, at;
    mov.b32 c0, 0;
    @p cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [x], [map, {c0, c1}], [bar], mask;
    wait:
    mbarrier.try_wait.parity.shared::cta.b64 q, [bar], 0;
    @!q bra wait;
    mad.wide.u32 out, rank, 4096, out;
    mad.wide.u32 out, t, 32, out;
    mad.lo.u32 y, t, 32, at;
    ld.shared.v4.b32 {v0, v1, v2, v3}, [y];
    st.global.v4.b32 [out], {v0, v1, v2, v3};
    ld.shared.v4.b32 {v0, v1, v2, v3}, [y+16];
    st.global.v4.b32 [out+16], {v0, v1, v2, v3};
    barrier.cluster.arrive.aligned;
    barrier.cluster.wait.aligned;)";
  kernel.directives = ".explicitcluster";
  kernel.grid = kernel.cluster = {2, 1, 1};
  kernel.block = {128, 1, 1};
  kernel.dynamic_smem_bytes = 4096;
  kernel.memory = {Memory::in(random_bytes(5, t.bytes)), Memory::out(8192)};
  kernel.maps = {{t.spec, 0, 0}};
  on_each(kernel, [&](const Bench&, const BenchKernel& done) {
    const int origin[2] = {0, 0};
    gpu::TensorMapSpec whole = t.spec;
    whole.box[1] = 32;
    for_each_byte(whole, origin, true, [&](int64_t from, u32 to) {
      for (u32 block = 0; block < 2; ++block)
        ASSERT_EQ(done.memory[1].bytes[4096 * block + exchanged(t.spec.swizzle, to)],
                  kernel.memory[0].bytes[static_cast<size_t>(from)]);
    });
  });
}

// A kernel replaces the address and size of a map in shared memory, copies it to global memory and uses it.
TEST(TensorCopy, ReplacesFieldsOfAMap) {
  const Tensor t = tensor_of(2, gpu::TensorType::u32, gpu::Swizzle::none, {32, 16}, {32, 16});
  BenchKernel kernel;
  kernel.body = std::string(kProlog) + R"(
    .shared .align 128 .b8 copy[128];
    .reg .b64 mine, tensor;
    ld.param.u64 out, [p1];
    ld.param.u64 mine, [p2];
    ld.param.u64 tensor, [p0];
    mov.u32 z, copy;
    // The first warp copies the map, one thread replaces.
    setp.ge.u32 q, t, 32;
    @q bra copied;
    mul.wide.u32 wide, t, 4;
    add.s64 wide, map, wide;
    .reg .b32 word;
    ld.b32 word, [wide];
    mad.lo.u32 y, t, 4, z;
    st.shared.b32 [y], word;
    bar.warp.sync -1;
    @!p bra replaced;
    add.s64 tensor, tensor, 4096;
    tensormap.replace.tile.global_address.shared::cta.b1024.b64 [z], tensor;
    mov.b32 x, 5;
    tensormap.replace.tile.global_dim.shared::cta.b1024.b32 [z], 1, x;
    replaced:
    bar.warp.sync -1;
    tensormap.cp_fenceproxy.global.shared::cta.tensormap::generic.release.gpu.sync.aligned [mine], [z], 128;
    fence.proxy.tensormap::generic.acquire.gpu [mine], 128;
    copied:
    @p mbarrier.init.shared::cta.b64 [bar], 1;
    fence.mbarrier_init.release.cluster;
    bar.sync 0;
    @!p bra wait;
    mbarrier.arrive.expect_tx.shared::cta.b64 _, [bar], 2048;
    mov.b32 c0, 0;
    mov.b32 c1, 0;
    cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [at], [mine, {c0, c1}], [bar];
    wait:
    mbarrier.try_wait.parity.shared::cta.b64 q, [bar], 0;
    @!q bra wait;
    mad.wide.u32 out, t, 16, out;
    mad.lo.u32 y, t, 16, at;
    ld.shared.v4.b32 {v0, v1, v2, v3}, [y];
    st.global.v4.b32 [out], {v0, v1, v2, v3};)";
  kernel.block = {128, 1, 1};
  kernel.dynamic_smem_bytes = 4096;
  kernel.memory = {Memory::in(random_bytes(6, 4096 + t.bytes)), Memory::out(2048),
                   Memory::inout(std::vector<u32>(32, 0))};
  kernel.memory[2].scratch = true;
  kernel.maps = {{t.spec, 0, 0}};
  for (const Needs needs : {Needs::hopper, Needs::blackwell}) {
    kernel.needs = needs;
    on_each(kernel, [&](const Bench&, const BenchKernel& done) {
      gpu::TensorMapSpec replaced = t.spec;
      replaced.dims[1] = 5;
      const int origin[2] = {0, 0};
      for_each_byte(replaced, origin, true, [&](int64_t from, u32 to) {
        ASSERT_EQ(done.memory[1].bytes[to],
                  from >= 0 ? kernel.memory[0].bytes[static_cast<size_t>(4096 + from)] : std::byte{0})
            << to;
      });
    });
  }
}

}  // namespace
}  // namespace tandem::test
