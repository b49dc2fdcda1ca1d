// Features, head dims, lengths and groups of heads in both types, within the error bound. Shapes are small, but exceed
// a tile.
#include <cmath>

#include "kernels/on_gpu.h"

namespace tandem::test {
namespace {

std::string number(int64_t n) { return std::to_string(n); }

// Cases for both types, collected and checked at the end.
class Kernels : public testing::Test {
 protected:
  void add(const std::string& flags, const std::function<void(Instance&)>& adjust = nullptr) {
    for (const char* dtype : {"--dtype bf16 ", "--dtype f16 "}) cases_.emplace_back(dtype + flags, adjust);
  }
  void TearDown() override { expect_all_good(cases_); }

 private:
  std::vector<CheckedCase> cases_;
};

const char* const kFeatures[] = {
    "",
    "--causal 1",
    "--causal 1 --top-left 1",
    "--left 9",
    "--right 5",
    "--left 7 --right 3",
    "--left 20 --right -4",
    "--left -4 --right 20",
    "--left 130 --right 100",
    "--left 100 --right -90 --top-left 1",
    "--left 3 --causal 1 --top-left 1",
    "--left 128 --causal 1",
    "--softcap 5",
    "--softcap 2 --causal 1",
    "--softcap 1 --values large",
    "--softcap 40 --values copy --causal 1",
    "--softcap 1000000",
    "--softcap 100000 --scale 30",
    "--scale 0.9",
    "--scale -0.2",
    "--scale -0.2 --causal 1 --softcap 3",
    "--alibi head --causal 1",
    "--alibi batch",
    "--alibi batch --top-left 1 --left 20",
    "--sink f32",
    "--sink same --causal 1",
    "--sink f32 --alibi head --softcap 6 --left 40 --causal 1",
    "--lse 0",
    "--values large",
    "--values large --causal 1 --sink f32",
    "--invariant 1 --causal 1",
    "--causal 1 --explicit 1 --diagonal 30",
    "--causal 1 --explicit 1 --diagonal -70",
    "--left 40 --right 9 --explicit 1 --diagonal 100 --float32 o",
    "--left 40 --explicit 1 --diagonal 1000000000000 --sink f32",
    "--alibi head --causal 1 --explicit 1 --diagonal 12",
    "--float32 o",
    "--float32 o --causal 1 --sm-limit 2",
};
const char* const kDenseFeatures[] = {
    "--bias f32",
    "--bias same --bias-shape 1hij",
    "--bias f32 --bias-shape b1i1",
    "--bias same --bias-shape bh1j",
    "--bias f32 --bias-shape 1111 --softcap 4",
    "--bias f32 --bias-shape b1ij --bias-inf 1 --causal 1",
    "--bias same --bias-inf 1 --sink same",
    "--bias f32 --bias-shape 11ij --alibi head --left 50",
    "--bias bool",
    "--bias bool --bias-shape b11j --causal 1",
    "--bias bool --bias-shape 11i1 --sink f32",
    "--layout 349525",
    "--layout 699050",
    "--layout 1048575 --bias f32",
};

TEST_F(Kernels, FeaturesDense) {
  for (const char* shape :
       {"--batch 2 --seqlen-q 197 --seqlen-k 213 --head-dim 64 --head-dim-v 64 --heads-q 4 --heads-k 2 ",
        "--seqlen-q 150 --seqlen-k 261 --head-dim 128 --head-dim-v 128 --heads-q 3 --heads-k 3 ",
        "--seqlen-q 170 --seqlen-k 130 --head-dim 256 --head-dim-v 256 --heads-q 2 --heads-k 1 "}) {
    for (const char* feature : kFeatures) add(std::string(shape) + feature);
    for (const char* feature : kDenseFeatures) add(std::string(shape) + feature);
  }
}

TEST_F(Kernels, FeaturesPacked) {
  for (const char* shape : {"--head-dim 64 --head-dim-v 64 --heads-q 4 --heads-k 2 --max-seqlen 0 ",
                            "--head-dim 192 --head-dim-v 128 --heads-q 2 --heads-k 2 --max-seqlen 50 "}) {
    const std::string lengths = "--packed 1 --lengths-q 20,0,133,1,270,64 --lengths-k 9,4,133,0,129,300 ";
    for (const char* feature : kFeatures) add(shape + lengths + feature);
    for (const char* feature : {"", "--causal 1", "--left 30 --alibi batch --sink f32"}) {
      add(shape + lengths + "--used-q 11,0,130,1,0,64 --used-k 9,0,133,0,100,211 " + feature);
      add(shape + lengths + "--layout 349525 " + feature);
      add(shape + lengths + "--layout 1048575 " + feature);
    }
  }
}

// Rows beyond the used rows are NaN, or infinite.
TEST_F(Kernels, UsedLengths) {
  const auto infinite = [](Instance& in) {
    for (Tensor* t : {&in.q, &in.k, &in.v}) {
      for (int64_t n = 0; n < t->size(); ++n) {
        if (std::isnan(t->get(n))) t->set(n, INFINITY);
      }
    }
  };
  for (const char* used : {"--used-q 3,141", "--used-k 150,17", "--used-q 141,0 --used-k 0,9", "--used-q 0,0",
                           "--used-k 0,0 --sink f32", "--used-q 129,64 --used-k 128,1"}) {
    for (const char* feature : {"", "--causal 1", "--left 20 --right 4 --top-left 1", "--bias f32 --alibi head"}) {
      const std::string flags =
          "--batch 2 --seqlen-q 141 --seqlen-k 153 --head-dim 128 --head-dim-v 64 --heads-q 4 --heads-k 2 " +
          std::string(used) + " " + feature;
      add(flags);
      add(flags, infinite);
    }
  }
}

TEST_F(Kernels, HeadDims) {
  for (int dim = 8; dim <= 256; dim += 8) {
    const std::string dims = "--head-dim " + number(dim) + " --head-dim-v " + number(dim);
    add("--seqlen-q 139 --seqlen-k 145 --causal 1 --heads-q 2 --heads-k 1 " + dims);
    add("--packed 1 --lengths-q 30,139 --lengths-k 145,30 --max-seqlen 0 " + dims);
  }
  for (const int d : {8, 64, 72, 128, 192, 200, 256}) {
    for (const int d_v : {8, 64, 72, 128, 192, 200, 256}) {
      if (d == d_v) continue;
      add("--seqlen-q 130 --seqlen-k 149 --layout 349525 --head-dim " + number(d) + " --head-dim-v " + number(d_v));
    }
  }
}

TEST_F(Kernels, Lengths) {
  for (const int q : {0, 1, 2, 63, 64, 65, 127, 128, 129, 191, 192, 193, 257}) {
    for (const int k : {0, 1, 7, 79, 80, 81, 95, 97, 111, 113, 127, 128, 129, 225, 257}) {
      const std::string lengths = " --seqlen-q " + number(q) + " --seqlen-k " + number(k);
      const char* mask = (q + k) % 3 == 0 ? "" : (q + k) % 3 == 1 ? "--causal 1" : "--left 30 --right 11";
      const int dim = (q + 2 * k) % 5 == 0 ? 128 : 64;
      add(mask + lengths + " --head-dim " + number(dim) + " --head-dim-v " + number(dim));
    }
  }
}

TEST_F(Kernels, GroupsOfHeads) {
  for (const int group : {1, 2, 3, 4, 5, 6, 8, 12, 16, 64, 128}) {
    for (const char* shape : {"--seqlen-q 1 --seqlen-k 300", "--seqlen-q 5 --seqlen-k 200 --causal 1",
                              "--seqlen-q 70 --seqlen-k 75 --causal 1 --left 40 --sink f32",
                              "--packed 1 --lengths-q 1,9,70 --lengths-k 90,9,33 --max-seqlen 0 --causal 1",
                              "--seqlen-q 33 --seqlen-k 40 --alibi head --bias f32 --layout 1048575"}) {
      add("--heads-k 2 --head-dim 64 --head-dim-v 64 --heads-q " + number(2 * group) + " " + shape);
    }
  }
}

// A query of 128 heads fills two warpgroups, and a tile of three warpgroups ends within a query.
TEST_F(Kernels, HeadsOfTwoWarpgroups) {
  for (const char* dims : {"--head-dim 64 --head-dim-v 64 ", "--head-dim 128 --head-dim-v 128 "}) {
    for (const char* options :
         {"--seqlen-q 1 --seqlen-k 700 --splits 3", "--seqlen-q 1 --seqlen-k 900 --page-size 64 --used-k 800",
          "--seqlen-q 3 --seqlen-k 300 --softcap 5 --causal 1", "--seqlen-q 4 --seqlen-k 90 --dropout 0.3 --left 20",
          "--packed 1 --lengths-q 1,3,2 --lengths-k 300,3,150 --causal 1 --softcap 5",
          "--batch 2 --seqlen-q 5 --seqlen-k 200 --used-q 5,2 --used-k 200,70 --causal 1 --max-scores 1",
          "--seqlen-q 3 --seqlen-k 70 --score-mod score*temperature+table[head,clamp(q-k+4,0,8)]",
          "--seqlen-q 3 --seqlen-k 200 --bias bool --bias-shape bhij", "--seqlen-q 2 --seqlen-k 200 --float32 o",
          "--seqlen-q 3 --seqlen-k 130 --alibi batch"}) {
      add(dims + std::string("--dtype bf16 --heads-q 256 --heads-k 2 ") + options);
    }
  }
}

// Several tiles of queries and of keys, including tiles that only long sequences get.
TEST_F(Kernels, Long) {
  for (const char* mask : {"", "--causal 1", "--left 100 --causal 1", "--left 300 --right 200", "--alibi head"}) {
    for (const char* dims : {"--head-dim 64 --head-dim-v 64 ", "--head-dim 128 --head-dim-v 128 ",
                             "--head-dim 192 --head-dim-v 128 ", "--head-dim 256 --head-dim-v 256 "}) {
      add(dims + std::string("--seqlen-q 500 --seqlen-k 700 ") + mask);
    }
  }
  add("--head-dim 128 --head-dim-v 128 --seqlen-q 200 --seqlen-k 8300");
  add("--head-dim 128 --head-dim-v 128 --seqlen-q 200 --seqlen-k 8300 --causal 1 --left 8000");
  add("--head-dim 128 --head-dim-v 128 --packed 1 --lengths-q 2000,10,33 --lengths-k 300,2000,9 --max-seqlen 7000");
}

// More tiles than resident blocks: the counter assigns them in a different order.
TEST_F(Kernels, ManyTiles) {
  for (const char* more : {"", "--causal 1", "--left 16 --causal 1"}) {
    add("--batch 3 --heads-q 64 --heads-k 8 --seqlen-q 260 --seqlen-k 33 --head-dim 64 --head-dim-v 64 " +
        std::string(more));
    std::string lengths;
    for (int b = 0; b < 400; ++b) lengths.append(b > 0 ? "," : "").append(number(b * 7919 % 41));
    add("--packed 1 --max-seqlen 0 --heads-q 4 --heads-k 4 --head-dim 64 --head-dim-v 64 --lengths-q " + lengths +
        " --lengths-k " + lengths + " " + more);
  }
}

// A CTA starts the next tile while its warpgroups finish different parts of the last tile. With windows, warpgroups
// skip n_blocks in which they see no key.
TEST_F(Kernels, TileAfterTile) {
  for (const char* window : {"--top-left 1 --left 20 --right -4", "--left 40 --right 10", "--causal 1", "--left 30"}) {
    for (const char* scores : {"", "--bias same", "--alibi head --softcap 20"}) {
      for (const char* lengths : {"", "--used-k 150,85", "--used-q 100,250 --used-k 7,150"}) {
        add("--batch 2 --heads-q 2 --heads-k 2 --seqlen-q 260 --seqlen-k 150 --head-dim 64 --head-dim-v 64 --sm-limit "
            "2 " +
            std::string(window) + " " + scores + " " + lengths);
      }
    }
  }
}

// With equal scores, small integers and one split, only the last division and the last conversion round. Weights of
// several splits are rounded too, and a sum of 0 need not stay 0.
TEST(KernelsExact, IntegersAreExactToOneRounding) {
  for (const std::string dtype : {"bf16", "f16"}) {
    for (const int keys : {1, 2, 3, 5, 64, 100, 129, 257, 1000}) {
      Repeated call("--dtype " + dtype +
                    " --values integer --splits 1 --seqlen-q 150 --head-dim 64 --head-dim-v 64 --seqlen-k " +
                    number(keys));
      call.run();
      const double half_unit = dtype == "f16" ? 0x1p-11 : 0x1p-8;  // float32 roundings are added below
      for (int64_t n = 0; n < call.outputs.out.size(); ++n) {
        double sum = 0;
        for (int64_t j = 0; j < keys; ++j) sum += call.instance->v.get(j * 64 + n % 64);
        const double reference = sum / keys;
        ASSERT_LE(std::fabs(call.outputs.out.get(n) - reference), std::fabs(reference) * (half_unit + 0x1p-22))
            << dtype << ", " << keys << " keys, element " << n;
      }
    }
  }
}

// The cases of compute-sanitizer: every path through the kernels once.
TEST_F(Kernels, Small) {
  add("--seqlen-q 130 --seqlen-k 150 --head-dim 64 --head-dim-v 64 --heads-q 2 --heads-k 1 --causal 1");
  add("--seqlen-q 130 --seqlen-k 260 --head-dim 128 --head-dim-v 128 --left 60 --right 20");
  add("--seqlen-q 70 --seqlen-k 90 --head-dim 192 --head-dim-v 128 --sink f32 --softcap 5");
  add("--seqlen-q 70 --seqlen-k 90 --head-dim 256 --head-dim-v 256 --alibi head --bias f32");
  add("--seqlen-q 70 --seqlen-k 90 --head-dim 72 --head-dim-v 72 --bias bool --layout 1048575");
  add("--packed 1 --lengths-q 20,0,133,1 --lengths-k 9,4,133,0 --max-seqlen 0 --head-dim 64 --head-dim-v 64 --causal "
      "1");
  add("--packed 1 --lengths-q 5,70 --lengths-k 90,33 --used-q 3,70 --used-k 81,0 --max-seqlen 3 --heads-q 8 "
      "--heads-k 2 --head-dim 128 --head-dim-v 128");
}

}  // namespace
}  // namespace tandem::test
