// Keys and values in pages: every option, sizes around the tiles of keys, and the bits of the same keys without pages.
// Instance shuffles and shares the pages, and poisons unused entries, rows and pages.
#include <sys/mman.h>

#include <cmath>
#include <cstring>
#include <string>
#include <vector>

#include "cpu/cpu.h"
#include "cpu/judged.h"

namespace tandem::test {
namespace {

class CpuPages : public testing::TestWithParam<const char*> {
 protected:
  std::string flags(const std::string& more) const {
    return std::string("--gradients none --head-dim 40 --head-dim-v 24 --dtype ") + GetParam() + " " + more + " ";
  }
};

INSTANTIATE_TEST_SUITE_P(, CpuPages, testing::Values("f32", "bf16", "f16"), [](const auto& one) { return one.param; });

const char* const kOptions[] = {
    "",
    "--causal 1",
    "--causal 1 --top-left 1",
    "--left 9",
    "--left 30 --causal 1 --sink f32",
    "--left 7 --right 3 --top-left 1",
    "--left 20 --explicit 1 --diagonal 40",
    "--softcap 5",
    "--scale -0.2",
    "--alibi batch --causal 1",
    "--bias f32",
    "--bias bool --bias-shape b11j",
    "--sink same",
    "--dropout 0.25",
    "--max-scores 1 --float32 o",
    "--used-q 3,1",
    "--used-q 0,2 --left 4",
    "--score-mod score-slope[head]*abs(q-k) --mask-mod (q+k)%3>0&&doc[batch,k//8]<2",
    "--blocks random --block-q 16 --block-k 32",
    "--layout 21845",
    "--layout 65535",
    "--max-seqlen 0",
};

// Queries in lanes and streamed queries, with pages smaller and larger than the 64 keys of a tile.
TEST_P(CpuPages, Options) {
  for (const char* option : kOptions) {
    expect_good(flags("--batch 2 --seqlen-q 41 --seqlen-k 144 --page-size 16 --used-k 130,67 --heads-q 2 --heads-k 2") +
                option);
    expect_good(flags("--batch 2 --seqlen-q 3 --seqlen-k 144 --page-size 72 --used-k 144,67 --heads-q 2 --heads-k 1") +
                option);
  }
}

TEST_P(CpuPages, PageSizes) {
  for (const int size : {1, 3, 15, 16, 48, 64, 80, 128, 300}) {
    const std::string page = std::to_string(size), keys = std::to_string((300 + size - 1) / size * size);
    const std::string pages =
        "--left 100 --causal 1 --heads-q 4 --heads-k 2 --page-size " + page + " --seqlen-k " + keys;
    expect_good(flags(pages + " --batch 3 --seqlen-q 1 --used-k 300,1,129"));
    expect_good(flags(pages + " --packed 1 --lengths-q 1,70,0,5,1 --used-k 300,75,9,5,0"));
  }
}

// Long sequences are split over tasks.
TEST_P(CpuPages, SplitKeys) {
  for (const char* option : {"", "--left 2000", "--sink f32 --softcap 9 --max-scores 1"}) {
    expect_good(
        flags("--batch 2 --seqlen-q 1 --seqlen-k 4992 --page-size 48 --used-k 4980,17 --heads-q 4 --heads-k 1") +
        option);
    expect_good(flags("--seqlen-q 40 --seqlen-k 4992 --page-size 16 --used-k 4500") + option);
  }
}

// The result of a Problem on two threads.
Outputs run(Instance& in, const Problem& p) {
  cpu::Threads threads(2, nullptr, nullptr);
  Outputs o = in.outputs(TANDEM_FORWARD);
  const Problem call = with_outputs(p, &o);
  std::vector<std::byte> workspace(cpu::workspace_size(call, threads.count()));
  cpu::forward(call, threads, workspace.data());
  return o;
}

// Gathers the keys of a sequence into dense tensors.
void gather(const Problem& p, const View& from, std::vector<std::byte>* memory, View* to, int64_t dim) {
  const PageTable& t = p.page_table;
  const int64_t rows = t.max_pages * t.page_size, bytes = dim * size_of(from.dtype);
  memory->assign(static_cast<size_t>(p.batch * rows * p.heads_k * bytes), std::byte{0});
  *to = {memory->data(), from.dtype, rows * p.heads_k * dim, p.heads_k * dim, dim, true};
  for (int64_t b = 0; b < p.batch; ++b) {
    for (int64_t j = 0; j < sequence_of(p, b).k_len; ++j) {
      for (int64_t h = 0; h < p.heads_k; ++h) {
        std::memcpy(to->at(b, j, h), from.at(t.at(b, j / t.page_size), j % t.page_size, h), static_cast<size_t>(bytes));
      }
    }
  }
}

TEST_P(CpuPages, EqualBitsWithoutPages) {
  for (const char* shape : {"--seqlen-q 1 --heads-q 4 --heads-k 2", "--seqlen-q 70 --heads-q 2 --heads-k 2"}) {
    Instance in(from_flags(flags(shape) + "--batch 2 --seqlen-k 1200 --page-size 16 --used-k 1190,333 --causal 1"));
    Outputs placeholder = in.outputs(TANDEM_FORWARD);
    const Problem paged = in.problem(TANDEM_FORWARD, &placeholder);
    Problem dense = paged;
    std::vector<std::byte> k, v;
    gather(paged, paged.k, &k, &dense.k, paged.head_dim);
    gather(paged, paged.v, &v, &dense.v, paged.head_dim_v);
    dense.page_table = {};
    EXPECT_EQ(run(in, paged).out.fingerprint(), run(in, dense).out.fingerprint()) << shape;
  }
}

// A padded batch: the last rows of q belong to no sequence. These rows are neither read nor written.
TEST_P(CpuPages, RowsAfterTheLastSequence) {
  Instance in(from_flags(flags("--packed 1 --lengths-q 1,20,3,9 --used-k 40,33,5,64 --seqlen-k 64 --page-size 16")));
  Outputs whole = in.outputs(TANDEM_FORWARD);
  Problem p = in.problem(TANDEM_FORWARD, &whole);
  whole = run(in, p);
  p.batch = 3;
  p.page_table.data = in.problem(TANDEM_FORWARD, &whole).page_table.data;
  const Outputs padded = run(in, p);
  for (int64_t n = 0; n < padded.out.size(); ++n) {
    if (n < 24 * 24) {
      EXPECT_EQ(padded.out.get(n), whole.out.get(n));
    } else {
      EXPECT_TRUE(std::isnan(padded.out.get(n)));
    }
  }
}

// One cache of K and V, with pages far from each other: offsets exceed 2^32 elements. Only touched memory exists.
TEST(CpuPagesFar, FusedCacheBeyond32Bits) {
  constexpr int64_t kPage = int64_t{1} << 32, kBytes = 3 * kPage * 4;
  void* memory = mmap(nullptr, kBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) GTEST_SKIP() << "48 GiB of address space are not available";
  Instance in(from_flags("--gradients none --batch 2 --seqlen-q 1 --seqlen-k 32 --page-size 16 --used-k 30,9"));
  Outputs placeholder = in.outputs(TANDEM_FORWARD);
  const Problem near = in.problem(TANDEM_FORWARD, &placeholder);
  Problem far = near;
  std::vector<int32_t> table = {2, 0, 1, -1};
  far.page_table.data = table.data();
  far.page_table.batch = 2;
  far.page_table.column = 1;
  far.page_table.pages = 3;
  auto* data = static_cast<std::byte*>(memory);
  const int64_t row = near.heads_k * 8;
  far.k = {data, DType::f32, kPage, 2 * row, 8, true};  // a row of K, then a row of V
  far.v = {data + row * 4, DType::f32, kPage, 2 * row, 8, true};
  for (int64_t b = 0; b < 2; ++b) {
    for (int64_t j = 0; j < sequence_of(near, b).k_len; ++j) {
      for (const auto view : {&Problem::k, &Problem::v}) {
        const int64_t from = near.page_table.at(b, j / 16), to = far.page_table.at(b, j / 16);
        std::memcpy((far.*view).at(to, j % 16, 0), (near.*view).at(from, j % 16, 0), static_cast<size_t>(row) * 4);
      }
    }
  }
  EXPECT_EQ(run(in, far).out.fingerprint(), run(in, near).out.fingerprint());
  munmap(memory, kBytes);
}

TEST(CpuPagesRefused, Backward) {
  Instance in(from_flags("--batch 1 --seqlen-q 1 --seqlen-k 16 --page-size 16 --used-k 9"));
  Outputs o = in.outputs(TANDEM_BACKWARD);
  const Status status = cpu::check(in.problem(TANDEM_BACKWARD, &o));
  EXPECT_EQ(status.message,
            "page_table must be NULL in the backward: gather each sequence's keys and values into dense or packed "
            "tensors");
}

}  // namespace
}  // namespace tandem::test
