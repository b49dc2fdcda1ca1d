// Tests of PTX ISA, "Data Movement and Conversion Instructions: Asynchronous copy": cp.async, cp.async.bulk, and
// reductions.
#include <algorithm>
#include <cmath>

#include "support/random.h"
#include "vgpu/src/units/numbers.h"
#include "vgpu/tests/instructions/bench.h"

namespace tandem::test {
namespace {

using u16 = uint16_t;
using u32 = uint32_t;
using s32 = int32_t;
using u64 = uint64_t;
using s64 = int64_t;

std::vector<u32> random_words(uint64_t seed, size_t count) {
  Random random(seed);
  std::vector<u32> words(count);
  for (u32& x : words) x = static_cast<u32>(random.next());
  return words;
}

// The kernel reads memory p0 and writes p1. "smem" is dynamic shared memory.
BenchKernel kernel_of(const std::string& body, const std::vector<u32>& in, size_t out_bytes, u32 threads = 32,
                      u32 cluster = 1) {
  BenchKernel kernel;
  kernel.body = R"(
  .reg .b32 t, x, y, z, at, to, bar, rank;
  .reg .b64 in, out, wide, policy;
  .reg .pred p, q;
  .shared .align 8 .b64 barrier;
  ld.param.u64 in, [p0];
  ld.param.u64 out, [p1];
  mov.u32 t, %tid.x;
  mov.u32 at, smem;
  mov.u32 bar, barrier;
  mov.u32 rank, %cluster_ctarank;
  setp.eq.u32 p, t, 0;
)" + body;
  kernel.dynamic_smem_bytes = 8192;
  kernel.block = {threads, 1, 1}, kernel.grid = {cluster, 1, 1}, kernel.cluster = {cluster, 1, 1};
  if (cluster > 1) kernel.directives = ".explicitcluster";
  kernel.memory = {Memory::in(in), Memory::out(out_bytes)};
  return kernel;
}

// Every thread copies its word of shared memory (at `from`) to p1.
std::string words_out(const std::string& from, int words_per_thread = 1) {
  std::string text = "mad.lo.s32 z, t, " + std::to_string(4 * words_per_thread) + ", " + from +
                     ";\nmad.wide.u32 out, t, " + std::to_string(4 * words_per_thread) + ", out;\n";
  for (int i = 0; i < words_per_thread; ++i) {
    const std::string offset = std::to_string(4 * i);
    text += "ld.shared.b32 x, [z+" + offset + "];\nst.global.b32 [out+" + offset + "], x;\n";
  }
  return text;
}
constexpr const char* kWait = R"(
  wait:
  mbarrier.try_wait.parity.shared::cta.b64 q, [bar], 0;
  @!q bra wait;
)";

TEST(CpAsync, EverySize) {
  const std::vector<u32> in = random_words(1, 128);
  for (const char* operation :
       {"cp.async.ca.shared.global [to], [wide], 16;", "cp.async.cg.shared.global [to], [wide], 16;",
        "cp.async.ca.shared::cta.global.L2::128B [to], [wide], 16;",
        "cp.async.ca.shared.global.L2::128B [to], [wide], 16;", "cp.async.cg.shared.global.L2::256B [to], [wide], 16;",
        ("cp.async.ca.shared.global [to], [wide], 4;\ncp.async.ca.shared.global [to+4], [wide+4], 4;\n"
         "cp.async.ca.shared.global [to+8], [wide+8], 8;")})
    for (const char* finish : {"cp.async.wait_all;", "cp.async.commit_group;\ncp.async.wait_group 0;"})
      on_each(kernel_of("mad.lo.s32 to, t, 16, at;\nmad.wide.u32 wide, t, 16, in;\n" + std::string(operation) + finish +
                            "\nbar.sync 0;\n" + words_out("at", 4),
                        in, 512),
              [&](const Bench&, const BenchKernel& done) {
                for (size_t i = 0; i < 128; ++i) ASSERT_EQ(done.memory[1].at<u32>(i), in[i]) << operation << finish;
              });
}

// Bytes beyond the source's size are zero.
TEST(CpAsync, FillsWithZeros) {
  const std::vector<u32> in = random_words(2, 128);
  on_each(kernel_of("mad.lo.s32 to, t, 16, at;\nmad.wide.u32 wide, t, 16, in;\nand.b32 x, t, 15;\n"
                    "cp.async.cg.shared.global [to], [wide], 16, x;\ncp.async.wait_all;\nbar.sync 0;\n" +
                        words_out("at", 4),
                    in, 512),
          [&](const Bench&, const BenchKernel& done) {
            for (size_t i = 0; i < 512; ++i)
              ASSERT_EQ(done.memory[1].at<uint8_t>(i),
                        i % 16 < i / 16 % 16 ? static_cast<uint8_t>(in[i / 4] >> (8 * (i % 4))) : 0)
                  << i;
          });
  on_each(kernel_of("mad.lo.s32 to, t, 16, at;\nmad.wide.u32 wide, t, 16, in;\nand.b32 x, t, 1;\nsetp.eq.u32 q, x, 1;\n"
                    "cp.async.ca.shared.global [to], [wide], 16, q;\ncp.async.wait_all;\nbar.sync 0;\n" +
                        words_out("at", 4),
                    in, 512),
          [&](const Bench&, const BenchKernel& done) {
            for (size_t i = 0; i < 128; ++i)
              ASSERT_EQ(done.memory[1].at<u32>(i), i / 4 % 2 == 1 ? 0 : in[i]) << "an ignored source";
          });
}

// Groups complete in order: if one group is pending, the first group has arrived.
TEST(CpAsync, Groups) {
  const std::vector<u32> in = random_words(3, 64);
  on_each(
      kernel_of("mad.lo.s32 to, t, 4, at;\nmad.wide.u32 wide, t, 4, in;\n"
                "cp.async.ca.shared.global [to], [wide], 4;\ncp.async.commit_group;\n"
                "cp.async.ca.shared.global [to+128], [wide+128], 4;\ncp.async.commit_group;\n"
                "cp.async.wait_group 1;\nld.shared.b32 y, [to];\ncp.async.wait_group 0;\nld.shared.b32 x, [to+128];\n"
                "mad.wide.u32 out, t, 8, out;\nst.global.v2.b32 [out], {y, x};",
                in, 256),
      [&](const Bench&, const BenchKernel& done) {
        for (size_t i = 0; i < 32; ++i) {
          ASSERT_EQ(done.memory[1].at<u32>(2 * i), in[i]);
          ASSERT_EQ(done.memory[1].at<u32>(2 * i + 1), in[32 + i]);
        }
      });
}

TEST(CpAsync, ArrivesOnABarrier) {
  const std::vector<u32> in = random_words(4, 64);
  for (const bool noinc : {false, true}) {
    // Without noinc the arrival is counted too, so that one more arrival is expected of each thread.
    const std::string arrive =
        noinc ? "cp.async.mbarrier.arrive.noinc.shared::cta.b64 [bar];"
              : "cp.async.mbarrier.arrive.shared::cta.b64 [bar];\nmbarrier.arrive.shared::cta.b64 _, [bar];";
    on_each(kernel_of("@p mbarrier.init.shared::cta.b64 [bar], 64;\nbar.sync 0;\nmad.lo.s32 to, t, 4, "
                      "at;\nmad.wide.u32 wide, t, 4, in;\n"
                      "cp.async.ca.shared.global [to], [wide], 4;\n" +
                          arrive + kWait +
                          "xor.b32 y, t, 63;\nmad.lo.s32 z, y, 4, at;\nld.shared.b32 x, [z];\nmad.wide.u32 out, t, 4, "
                          "out;\nst.global.b32 [out], x;",
                      in, 256, 64),
            [&](const Bench&, const BenchKernel& done) {
              for (size_t i = 0; i < 64; ++i) ASSERT_EQ(done.memory[1].at<u32>(i), in[i ^ 63]);
            });
  }
}

TEST(BulkCopy, FromGlobalMemory) {
  const std::vector<u32> in = random_words(5, 256);
  for (const char* copy :
       {"cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [at], [in], 1024, [bar];",
        "cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes [at], [in], 1024, [bar];",
        "mov.u64 policy, "
        "0x14F0000000000000;\ncp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [at], "
        "[in], 1024, [bar], policy;",
        // Copies two pieces, the second piece first.
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [at+16], [in+16], 1008, [bar];\n"
        "mov.u32 x, 16;\ncp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [at], [in], x, [bar];"})
    on_each(kernel_of("@!p bra go;\nmbarrier.init.shared::cta.b64 [bar], 1;\nfence.mbarrier_init.release.cluster;\n"
                      "mbarrier.arrive.expect_tx.shared::cta.b64 _, [bar], 1024;\n" +
                          std::string(copy) + "\ngo:\nbar.sync 0;\n" + kWait + words_out("at", 8),
                      in, 1024),
            [&](const Bench&, const BenchKernel& done) {
              for (size_t i = 0; i < 256; ++i) ASSERT_EQ(done.memory[1].at<u32>(i), in[i]) << copy;
            });
  on_each(kernel_of("cp.async.bulk.prefetch.L2.global [in], 1024;\nmad.wide.u32 in, t, 4, in;\nld.global.b32 x, "
                    "[in];\nmad.wide.u32 out, t, 4, out;\nst.global.b32 [out], x;",
                    in, 128),
          [&](const Bench&, const BenchKernel& done) {
            for (size_t i = 0; i < 32; ++i) ASSERT_EQ(done.memory[1].at<u32>(i), in[i]);
          });
}

// The threads write shared memory, and the bulk engine copies it to p1.
constexpr const char* kFill = R"(
  mad.lo.s32 to, t, 32, at;
  mad.lo.s32 x, t, 17, 3;
  st.shared.v4.b32 [to], {x, t, x, t};
  st.shared.v4.b32 [to+16], {t, x, t, x};
  fence.proxy.async.shared::cta;
  bar.sync 0;
)";
u32 filled(u32 i) {
  const u32 t = i / 8, x = 17 * t + 3;
  return (i % 2 == 0) == (i % 8 < 4) ? x : t;
}

TEST(BulkCopy, ToGlobalMemory) {
  for (const char* copy :
       {"cp.async.bulk.global.shared::cta.bulk_group [out], [at], 1024;",
        "mov.u64 policy, 0x12F0000000000000;\ncp.async.bulk.global.shared::cta.bulk_group.L2::cache_hint [out], [at], "
        "1024, policy;"})
    for (const char* wait :
         {"cp.async.bulk.wait_group 0;", "cp.async.bulk.wait_group.read 0;\ncp.async.bulk.wait_group 0;"})
      on_each(kernel_of(
                  std::string(kFill) + "@!p bra done;\n" + copy + "\ncp.async.bulk.commit_group;\n" + wait + "\ndone:",
                  {0, 0, 0, 0}, 1024),
              [&](const Bench&, const BenchKernel& done) {
                for (u32 i = 0; i < 256; ++i) ASSERT_EQ(done.memory[1].at<u32>(i), filled(i)) << copy;
              });
  // Copies only the bytes of every sixteen that a mask selects.
  BenchKernel masked = kernel_of(std::string(kFill) +
                                     ".reg .b16 mask;\nmov.b16 mask, 0x0f3c;\n@!p bra done;\n"
                                     "cp.async.bulk.global.shared::cta.bulk_group.cp_mask [out], [at], 1024, mask;\n"
                                     "cp.async.bulk.commit_group;\ncp.async.bulk.wait_group 0;\ndone:",
                                 {0, 0, 0, 0}, 1024);
  masked.needs = Needs::blackwell;
  on_each(masked, [](const Bench&, const BenchKernel& done) {
    for (u32 i = 0; i < 1024; ++i)
      ASSERT_EQ(done.memory[1].at<uint8_t>(i),
                (0x0f3c >> (i % 16) & 1) != 0 ? static_cast<uint8_t>(filled(i / 4) >> (8 * (i % 4))) : 0xa5);
  });
}

TEST(BulkCopy, ToAnotherBlock) {
  on_each(kernel_of(std::string("@p mbarrier.init.shared::cta.b64 [bar], 1;\nfence.mbarrier_init.release.cluster;\n"
                                "@p mbarrier.arrive.expect_tx.shared::cta.b64 _, [bar], 1024;\n"
                                "barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;\n") +
                        kFill + R"(
      @!p bra go;
      xor.b32 y, rank, 1;
      add.u32 z, at, 2048;
      mapa.shared::cluster.u32 z, z, y;
      mapa.shared::cluster.u32 y, bar, y;
      cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [z], [at], 1024, [y];
      go:)" + kWait + "mad.wide.u32 out, rank, 1024, out;\nadd.u32 to, at, 2048;\n" +
                        words_out("to", 8) + "barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;",
                    {0, 0, 0, 0}, 2048, 32, 2),
          [](const Bench&, const BenchKernel& done) {
            for (u32 i = 0; i < 512; ++i) ASSERT_EQ(done.memory[1].at<u32>(i), filled(i % 256));
          });
}

TEST(BulkCopy, ToManyBlocks) {
  const std::vector<u32> in = random_words(6, 256);
  // Block 2 sends its copy to blocks 0, 2 and 3.
  on_each(
      kernel_of(std::string("@p mbarrier.init.shared::cta.b64 [bar], 1;\nfence.mbarrier_init.release.cluster;\n"
                            "mul.lo.u32 z, t, 32;\nadd.u32 z, z, at;\nmov.b32 x, 0;\nst.shared.v4.b32 [z], {x, x, x, "
                            "x};\nst.shared.v4.b32 [z+16], {x, x, x, x};\n"
                            "fence.proxy.async.shared::cta;\nsetp.ne.u32 q, rank, 1;\nand.pred q, p, q;\n"
                            "@q mbarrier.arrive.expect_tx.shared::cta.b64 _, [bar], 1024;\n"
                            "barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;\n"
                            ".reg .b16 mask;\nmov.b16 mask, 13;\nsetp.eq.u32 q, rank, 2;\nand.pred q, p, q;\n"
                            "@q cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
                            "[at], [in], 1024, [bar], mask;\n"
                            "setp.eq.u32 q, rank, 1;\n@q bra have;\n") +
                    kWait + "have:\nmad.wide.u32 out, rank, 1024, out;\n" + words_out("at", 8) +
                    "barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;",
                in, 4096, 32, 4),
      [&](const Bench&, const BenchKernel& done) {
        for (u32 i = 0; i < 1024; ++i) ASSERT_EQ(done.memory[1].at<u32>(i), i / 256 == 1 ? 0 : in[i % 256]) << i;
      });
}

// ---- Reductions ----
struct Reduction {
  std::string form;  // "add.u32"
  int bytes;
  u64 (*f)(u64, u64);
};
template <class T, class F>
u64 as(u64 a, u64 b, F f) {
  T x, y;
  std::memcpy(&x, &a, sizeof x), std::memcpy(&y, &b, sizeof y);
  const T z = static_cast<T>(f(x, y));
  u64 result = 0;
  std::memcpy(&result, &z, sizeof z);
  return result;
}
u64 half_sum(u64 a, u64 b, vgpu::units::Format format) {
  using vgpu::units::decode;
  return vgpu::units::encode(decode(static_cast<u32>(a), format) + decode(static_cast<u32>(b), format), format);
}
u64 half_choice(u64 a, u64 b, vgpu::units::Format format, bool max) {
  const float x = vgpu::units::decode(static_cast<u32>(a), format),
              y = vgpu::units::decode(static_cast<u32>(b), format);
  return (x < y || (x == y && std::signbit(x))) != max ? a : b;
}
const Reduction kReductions[] = {
    {"add.u32", 4, [](u64 a, u64 b) { return as<u32>(a, b, [](u32 x, u32 y) { return x + y; }); }},
    {"add.s32", 4, [](u64 a, u64 b) { return as<u32>(a, b, [](u32 x, u32 y) { return x + y; }); }},
    {"add.u64", 8, [](u64 a, u64 b) { return a + b; }},
    {"min.u32", 4, [](u64 a, u64 b) { return as<u32>(a, b, [](u32 x, u32 y) { return std::min(x, y); }); }},
    {"min.s32", 4, [](u64 a, u64 b) { return as<s32>(a, b, [](s32 x, s32 y) { return std::min(x, y); }); }},
    {"min.u64", 8, [](u64 a, u64 b) { return std::min(a, b); }},
    {"min.s64", 8, [](u64 a, u64 b) { return as<s64>(a, b, [](s64 x, s64 y) { return std::min(x, y); }); }},
    {"max.u32", 4, [](u64 a, u64 b) { return as<u32>(a, b, [](u32 x, u32 y) { return std::max(x, y); }); }},
    {"max.s32", 4, [](u64 a, u64 b) { return as<s32>(a, b, [](s32 x, s32 y) { return std::max(x, y); }); }},
    {"max.u64", 8, [](u64 a, u64 b) { return std::max(a, b); }},
    {"max.s64", 8, [](u64 a, u64 b) { return as<s64>(a, b, [](s64 x, s64 y) { return std::max(x, y); }); }},
    {"inc.u32", 4, [](u64 a, u64 b) { return as<u32>(a, b, [](u32 x, u32 y) { return x >= y ? 0 : x + 1; }); }},
    {"dec.u32", 4,
     [](u64 a, u64 b) { return as<u32>(a, b, [](u32 x, u32 y) { return x == 0 || x > y ? y : x - 1; }); }},
    {"and.b32", 4, [](u64 a, u64 b) { return a & b; }},
    {"or.b32", 4, [](u64 a, u64 b) { return a | b; }},
    {"xor.b32", 4, [](u64 a, u64 b) { return a ^ b; }},
    {"and.b64", 8, [](u64 a, u64 b) { return a & b; }},
    {"or.b64", 8, [](u64 a, u64 b) { return a | b; }},
    {"xor.b64", 8, [](u64 a, u64 b) { return a ^ b; }},
    // Subnormal numbers are kept, although the ISA flushes them.
    {"add.f32", 4, [](u64 a, u64 b) { return as<float>(a, b, [](float x, float y) { return x + y; }); }},
    {"L2::cache_hint.add.f32", 4, [](u64 a, u64 b) { return as<float>(a, b, [](float x, float y) { return x + y; }); }},
    {"add.f64", 8, [](u64 a, u64 b) { return as<double>(a, b, [](double x, double y) { return x + y; }); }},
    {"add.noftz.f16", 2, [](u64 a, u64 b) { return half_sum(a, b, vgpu::units::Format::f16); }},
    {"add.noftz.bf16", 2, [](u64 a, u64 b) { return half_sum(a, b, vgpu::units::Format::bf16); }},
    {"min.f16", 2, [](u64 a, u64 b) { return half_choice(a, b, vgpu::units::Format::f16, false); }},
    {"max.f16", 2, [](u64 a, u64 b) { return half_choice(a, b, vgpu::units::Format::f16, true); }},
    {"min.bf16", 2, [](u64 a, u64 b) { return half_choice(a, b, vgpu::units::Format::bf16, false); }},
    {"max.bf16", 2, [](u64 a, u64 b) { return half_choice(a, b, vgpu::units::Format::bf16, true); }},
};

// Numbers of the type except NaN, because PTX does not specify the result of two NaNs.
std::vector<u32> operands_of(const Reduction& r, uint64_t seed) {
  Random random(seed);
  std::vector<u32> words(256);
  const bool is_float = r.form.find(".f") != std::string::npos || r.form.find(".bf") != std::string::npos;
  for (size_t i = 0; i < words.size(); ++i) {
    words[i] = static_cast<u32>(random.next());
    if (!is_float) continue;
    const double normal = random.normal();
    const auto x = static_cast<float>(normal * std::exp2(random.between(-4, 4)));
    if (r.bytes == 4) std::memcpy(&words[i], &x, 4);
    if (r.bytes == 2) {
      const auto format =
          r.form.find("bf16") != std::string::npos ? vgpu::units::Format::bf16 : vgpu::units::Format::f16;
      words[i] = vgpu::units::encode(x, format) | vgpu::units::encode(-x, format) << 16;
    }
    if (r.bytes == 8 && i % 2 == 1) words[i] = (words[i] & 0x800fffff) | 0x3ff00000;
  }
  if (r.form.find("add.f32") != std::string::npos) words[0] = 0x00012345, words[1] = 0x80000001;  // subnormal
  return words;
}

TEST(BulkReduce, IntoGlobalMemory) {
  for (const Reduction& r : kReductions) {
    SCOPED_TRACE(r.form);
    const std::vector<u32> before = operands_of(r, 7), in = operands_of(r, 8);
    BenchKernel kernel = kernel_of(
        "mad.lo.s32 to, t, 32, at;\nmad.wide.u32 wide, t, 32, in;\n.reg .b32 v<4>;\n"
        "ld.global.v4.b32 {v0, v1, v2, v3}, [wide];\nst.shared.v4.b32 [to], {v0, v1, v2, v3};\n"
        "ld.global.v4.b32 {v0, v1, v2, v3}, [wide+16];\nst.shared.v4.b32 [to+16], {v0, v1, v2, v3};\n"
        "fence.proxy.async.shared::cta;\nbar.sync 0;\n@!p bra done;\n"
        "cp.reduce.async.bulk.global.shared::cta.bulk_group." +
            r.form + " [out], [at], 1024" + (r.form.starts_with("L2") ? ", 0x1000000000000000" : "") +
            ";\ncp.async.bulk.commit_group;\ncp.async.bulk.wait_group 0;\ndone:",
        in, 0);
    kernel.memory[1] = Memory::inout(before);
    on_each(kernel, [&](const Bench&, const BenchKernel& done) {
      for (size_t i = 0; i < 1024 / static_cast<size_t>(r.bytes); ++i) {
        const auto bytes = static_cast<size_t>(r.bytes);
        u64 a = 0, b = 0, got = 0;
        std::memcpy(&a, reinterpret_cast<const std::byte*>(before.data()) + i * bytes, bytes);
        std::memcpy(&b, reinterpret_cast<const std::byte*>(in.data()) + i * bytes, bytes);
        std::memcpy(&got, done.memory[1].bytes.data() + i * bytes, bytes);
        ASSERT_EQ(got, r.f(a, b)) << "element " << i << ": " << a << " and " << b;
      }
    });
  }
}

TEST(BulkReduce, IntoAnotherBlock) {
  for (const Reduction& r : kReductions) {
    // Valid forms have integers of 32 bits, and sums of 64 bits.
    const bool exists = r.form == "add.u64" || (r.bytes == 4 && r.form.find("add.f32") == std::string::npos);
    if (!exists) continue;
    SCOPED_TRACE(r.form);
    const std::vector<u32> in = operands_of(r, 9);
    // Both blocks begin with the words of p0. Each adds its words to the other's copy at +2048.
    on_each(
        kernel_of(std::string(
                      "@p mbarrier.init.shared::cta.b64 [bar], 1;\nfence.mbarrier_init.release.cluster;\n"
                      "@p mbarrier.arrive.expect_tx.shared::cta.b64 _, [bar], 1024;\n"
                      "mad.lo.s32 to, t, 32, at;\nmad.wide.u32 wide, t, 32, in;\n.reg .b32 v<4>;\n"
                      "ld.global.v4.b32 {v0, v1, v2, v3}, [wide];\nst.shared.v4.b32 [to], {v0, v1, v2, "
                      "v3};\nst.shared.v4.b32 [to+2064], {v0, v1, v2, v3};\n"
                      "ld.global.v4.b32 {v0, v1, v2, v3}, [wide+16];\nst.shared.v4.b32 [to+16], {v0, v1, v2, "
                      "v3};\nst.shared.v4.b32 [to+2048], {v0, v1, v2, v3};\n"
                      "fence.proxy.async.shared::cta;\nbarrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;\n"
                      "@!p bra go;\nxor.b32 y, rank, 1;\nadd.u32 z, at, 2048;\nmapa.shared::cluster.u32 z, z, "
                      "y;\nmapa.shared::cluster.u32 y, bar, y;\n"
                      "cp.reduce.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes.") +
                      r.form + " [z], [at], 1024, [y];\ngo:" + kWait +
                      "mad.wide.u32 out, rank, 1024, out;\nadd.u32 to, at, 2048;\n" + words_out("to", 8) +
                      "barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;",
                  in, 2048, 32, 2),
        [&](const Bench&, const BenchKernel& done) {
          const auto bytes = static_cast<size_t>(r.bytes);
          std::vector<u32> before = in;
          for (size_t i = 0; i < 256; i += 8)
            for (size_t j = 0; j < 4; ++j) std::swap(before[i + j], before[i + j + 4]);
          for (size_t i = 0; i < 2048 / bytes; ++i) {
            u64 a = 0, b = 0, got = 0;
            const size_t at = i * bytes % 1024;
            std::memcpy(&a, reinterpret_cast<const std::byte*>(before.data()) + at, bytes);
            std::memcpy(&b, reinterpret_cast<const std::byte*>(in.data()) + at, bytes);
            std::memcpy(&got, done.memory[1].bytes.data() + i * bytes, bytes);
            ASSERT_EQ(got, r.f(a, b)) << "element " << i;
          }
        });
  }
}

}  // namespace
}  // namespace tandem::test
