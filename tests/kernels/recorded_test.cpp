// A file of this folder has a real Hopper GPU's results of a dozen small problems. The virtual GPU must equal them,
// except for the order of sums. With TANDEM_RECORD=<file> on a GPU the tests write it (tools/gpu/record.sh).
//
// A head (device, driver, nvrtc, date, commit) precedes the lines of each problem:
//   case <flags>
//   inputs <hash>             of all inputs
//   out <base64>, lse <base64>  of the recorded rows, in the order of sequences, heads and rows
//
// The problem is the key, not the PTX, because compilers differ. Plans have the tiles of the table and one split,
// because predicted times may choose another order of sums. Both devices are within a bound, so they differ by at most
// twice that. With e = 2^-24 the error of one float32 operation, and 2e where the hardware truncates:
//   scores    d * 2e * |q| |k| * scale, from the order of q k^T
//   weights   P = exp(score - m) is off by that and by 4e of the exponential, relative; as it is rounded to 16 bits in
//             between, it may end on either side of a tie: one unit in the last place of the 16-bit type
//   out       weights' relative error, and n * 2e from the order of P V and of the sum, times sum P |v| / sum P;
//             and its own rounding
//   lse       the scores' error, n * 2e, and its own rounding
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <map>
#include <stdexcept>

#include "base/text.h"
#include "kernels/on_gpu.h"
#include "reference/reference.h"
#include "support/base64.h"

namespace tandem::test {
namespace {

const char* const kCases[] = {
    "--dtype bf16 --heads-q 2 --heads-k 2 --seqlen-q 300 --seqlen-k 300 --head-dim 128 --head-dim-v 128 --causal 1",
    "--dtype f16 --heads-q 2 --heads-k 2 --seqlen-q 300 --seqlen-k 333 --head-dim 128 --head-dim-v 128 --causal 1",
    "--dtype bf16 --heads-q 2 --heads-k 1 --seqlen-q 200 --seqlen-k 500 --head-dim 64 --head-dim-v 64",
    "--dtype f16 --heads-q 1 --heads-k 1 --seqlen-q 150 --seqlen-k 400 --head-dim 256 --head-dim-v 256",
    "--dtype bf16 --heads-q 1 --heads-k 1 --seqlen-q 150 --seqlen-k 280 --head-dim 256 --head-dim-v 256 --causal 1",
    "--dtype bf16 --heads-q 2 --heads-k 2 --seqlen-q 190 --seqlen-k 260 --head-dim 192 --head-dim-v 128 --causal 1",
    "--dtype bf16 --heads-q 4 --heads-k 2 --seqlen-q 200 --seqlen-k 300 --head-dim 128 --head-dim-v 128 --left 70 "
    "--causal 1 --sink f32",
    "--dtype bf16 --heads-q 3 --heads-k 3 --seqlen-q 130 --seqlen-k 260 --head-dim 64 --head-dim-v 64 --alibi head",
    "--dtype bf16 --heads-q 2 --heads-k 2 --seqlen-q 130 --seqlen-k 200 --head-dim 128 --head-dim-v 128 --bias f32",
    "--dtype f16 --heads-q 2 --heads-k 1 --seqlen-q 99 --seqlen-k 201 --head-dim 64 --head-dim-v 64 --bias same "
    "--bias-inf 1 --sink same",
    "--dtype bf16 --packed 1 --lengths-q 70,0,133,1 --lengths-k 90,4,140,17 --max-seqlen 0 --heads-q 4 --heads-k 2 "
    "--head-dim 128 --head-dim-v 128 --causal 1",
    "--dtype f16 --packed 1 --lengths-q 5,120 --lengths-k 200,300 --max-seqlen 0 --heads-q 8 --heads-k 1 --head-dim 64 "
    "--head-dim-v 64",
    "--dtype bf16 --heads-q 8 --heads-k 1 --seqlen-q 3 --seqlen-k 600 --head-dim 128 --head-dim-v 128 --causal 1",
    "--dtype f16 --heads-q 2 --heads-k 1 --seqlen-q 140 --seqlen-k 250 --head-dim 128 --head-dim-v 128 --softcap 5",
};
constexpr int64_t kRows = 24;  // recorded rows per head and sequence
// The share of results that may differ. Most are equal, because errors are far below the precision of 16 bits.
constexpr double kDiffering = 0.03;

std::string variable(const char* name) {
  const char* value = std::getenv(name);
  return value == nullptr ? "" : value;
}

struct Given {
  uint64_t inputs = 0;
  std::vector<std::byte> out, lse;
};

std::map<std::string, Given> read_recording(const std::string& path) {
  std::map<std::string, Given> all;
  Given* given = nullptr;
  std::ifstream file(path);
  for (std::string line; std::getline(file, line);) {
    const std::string word = line.substr(0, line.find(' ')), rest = line.substr(std::min(line.size(), word.size() + 1));
    if (word == "device") std::printf("Recorded on %s.\n", rest.c_str());
    if (word == "case") given = &all[rest];
    if (given == nullptr) continue;
    if (word == "inputs") given->inputs = std::stoull(rest, nullptr, 16);
    if (word == "out") given->out = from_base64(rest);
    if (word == "lse") given->lse = from_base64(rest);
  }
  return all;
}

// Calls f(sequence, head, row) for the recorded rows.
template <class F>
void for_each_row(const Problem& p, F&& f) {
  for (int64_t b = 0; b < p.batch; ++b) {
    const Sequence s = sequence_of(p, b);
    for (int64_t h = 0; h < p.heads_q; ++h)
      for (int64_t n = 0; n < std::min(kRows, s.q_rows); ++n)
        f(b, h, s.q_begin + (s.q_rows <= kRows ? n : n * (s.q_rows - 1) / (kRows - 1)));
  }
}

void append(const std::byte* from, int64_t bytes, std::vector<std::byte>* to) {
  to->insert(to->end(), from, from + bytes);
}

Given results_of(const Problem& p, uint64_t inputs) {
  Given given;
  given.inputs = inputs;
  for_each_row(p, [&](int64_t b, int64_t h, int64_t row) {
    append(p.out.at(b, row, h), p.head_dim_v * size_of(p.out.dtype), &given.out);
    append(p.lse.at(b, row, h), size_of(p.lse.dtype), &given.lse);
  });
  return given;
}

// One unit in the last place of a 16-bit type, relative; half of it is what rounding loses.
double unit_of(DType t) { return t == DType::bf16 ? 0x1p-7 : 0x1p-10; }

double largest_row(const Tensor& t, int64_t columns) {
  double largest = 0, square = 0;
  for (int64_t n = 0; n < t.size(); ++n) {
    square += t.get(n) * t.get(n);
    if ((n + 1) % columns != 0) continue;
    if (std::isfinite(square)) largest = std::max(largest, square);  // unused rows would not count
    square = 0;
  }
  return std::sqrt(largest);
}

// The largest allowed difference of two results.
struct Bound {
  double scores = 0, sums = 0;
  Outputs weighted;  // sum P |v| / sum P

  Bound(Instance& instance, const Problem& p) {
    scores = 2 * static_cast<double>(p.head_dim) * 0x1p-23 * largest_row(instance.q, p.head_dim) *
             largest_row(instance.k, p.head_dim) * std::fabs(p.softmax_scale);
    sums = 2 * static_cast<double>(p.seqlen_k) * 0x1p-23;
    for (int64_t n = 0; n < instance.v.size(); ++n) instance.v.set(n, std::fabs(instance.v.get(n)));
    weighted = instance.exact_outputs(TANDEM_FORWARD);
    reference::forward(with_outputs(p, &weighted));
  }
  double of_out(DType type, double x, double weight) const {
    return unit_of(type) * std::fabs(x) + (2 * scores + 8 * 0x1p-24 + unit_of(type) + sums) * weight;
  }
  double of_lse(double x) const { return scores + sums + 0x1p-22 * std::max(1.0, std::fabs(x)); }
};

struct Difference {
  int64_t elements = 0, differ = 0;
  double units = 0, share = 0;  // largest, in units of the last place and of the bound

  void add(double x, double y, double unit, double allowed) {
    ++elements;
    if (x == y || (std::isnan(x) && std::isnan(y))) return;
    ++differ;
    const double d = std::isfinite(x) && std::isfinite(y) ? std::fabs(x - y) : INFINITY;
    units = std::max(units, d / unit);
    share = std::max(share, d / allowed);
  }
};

void compare(const std::string& flags, const Given& there, const Given& here, const Problem& p, Instance& instance) {
  ASSERT_EQ(there.inputs, here.inputs) << "other inputs than those of the recording";
  ASSERT_EQ(there.out.size(), here.out.size());
  ASSERT_EQ(there.lse.size(), here.lse.size());
  Bound bound(instance, p);
  const Problem weights = with_outputs(p, &bound.weighted);
  Difference out, lse;
  size_t at = 0, lse_at = 0;
  for_each_row(p, [&](int64_t b, int64_t h, int64_t row) {
    for (int64_t c = 0; c < p.head_dim_v; ++c, at += static_cast<size_t>(size_of(p.out.dtype))) {
      const double x = load(p.out.dtype, &there.out[at]), y = load(p.out.dtype, &here.out[at]);
      const double weight = load(DType::f64, weights.out.at(b, row, h) + c * size_of(DType::f64));
      const double unit = unit_of(p.out.dtype) * std::exp2(x == 0 ? -14 : std::max(std::ilogb(x), -14));
      out.add(x, y, unit, bound.of_out(p.out.dtype, std::max(std::fabs(x), std::fabs(y)), weight));
    }
    const double x = load(p.lse.dtype, &there.lse[lse_at]), y = load(p.lse.dtype, &here.lse[lse_at]);
    lse.add(x, y, 0x1p-23 * std::exp2(std::isfinite(x) && x != 0 ? std::ilogb(x) : 0), bound.of_lse(x));
    lse_at += static_cast<size_t>(size_of(p.lse.dtype));
  });
  std::printf(
      "%s\n  out: %lld of %lld differ, by %.3g units in the last place at most, %.3g of the bound; "
      "lse: %lld of %lld, %.3g, %.3g\n",
      flags.c_str(), static_cast<long long>(out.differ), static_cast<long long>(out.elements), out.units, out.share,
      static_cast<long long>(lse.differ), static_cast<long long>(lse.elements), lse.units, lse.share);
  EXPECT_LE(out.share, 1) << flags;
  EXPECT_LE(lse.share, 1) << flags;
  EXPECT_LE(static_cast<double>(out.differ), kDiffering * static_cast<double>(out.elements)) << flags;
}

TEST(KernelsRecorded, SameAsARealHopper) {
  const std::string write_to = variable("TANDEM_RECORD"), other = variable("TANDEM_RECORDED");
  const std::string path = other.empty() ? TANDEM_KERNELS_RECORDED : other;
  if (the_gpu()->device().properties().compute_major != 9) GTEST_SKIP() << "The recording is of Hopper.";
  const std::map<std::string, Given> recorded =
      write_to.empty() ? read_recording(path) : std::map<std::string, Given>();
  if (write_to.empty() && recorded.empty()) GTEST_SKIP() << path << " is missing: tools/gpu/record.sh writes it.";
  plan::Tuning tuning;
  tuning.sm90.forward_order.worth = 0;
  const ForcedTuning forced(tuning);
  for (const std::string flags : kCases) {
    Repeated call(flags);
    call.run();
    const uint64_t inputs = call.instance->fingerprint();
    const Problem p = call.instance->problem(TANDEM_FORWARD, &call.outputs);
    const Given given = results_of(p, inputs);
    if (!write_to.empty()) {
      std::ofstream file(write_to, std::ios::app);
      file << "case " << flags << "\ninputs " << std::hex << inputs << "\nout " << to_base64(given.out) << "\nlse "
           << to_base64(given.lse) << "\n";
      ASSERT_TRUE(file.flush()) << write_to;
      continue;
    }
    const auto found = recorded.find(flags);
    ASSERT_NE(found, recorded.end()) << flags << " is not recorded: run tools/gpu/record.sh again";
    compare(flags, found->second, given, p, *call.instance);
  }
}

}  // namespace
}  // namespace tandem::test
