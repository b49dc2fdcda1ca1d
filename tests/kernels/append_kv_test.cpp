// Appending to a cache on a GPU.
#include "kernels/on_gpu.h"
#include "support/append_case.h"

namespace tandem::test {
namespace {

// Copies the tensors to the GPU, appends there, and copies the results back.
void append_on(const Gpu& gpu, AppendInstance& instance) {
  tandem_append_kv_args args = instance.args();
  DeviceCopies copies(gpu, instance.tensors());
  for (const tandem_tensor** tensor :
       {&args.k, &args.v, &args.k_cache, &args.v_cache, &args.slot_mapping, &args.page_table, &args.cache_seqlens,
        &args.cache_batch_idx, &args.cu_seqlens_new, &args.q, &args.q_out, &args.cu_seqlens_q, &args.rotary_cos,
        &args.rotary_sin, &args.rotary_seqlens, &args.positions}) {
    *tensor = copies.of(*tensor);
  }
  if (tandem_append_kv(gpu.context(), &args, gpu.stream()) != TANDEM_OK) throw std::runtime_error(tandem_last_error());
  copies.fetch();
}

std::string checked(const AppendCase& c, const ChangesAppend& adjust = nullptr) {
  std::string verdict;
  for (const auto& gpu : the_gpus()) {
    try {
      verdict = check_append(
          c, [&](AppendInstance& instance) { append_on(*gpu, instance); }, adjust);
    } catch (const std::exception& error) {
      verdict = error.what();
    }
    if (!verdict.empty()) break;
  }
  return verdict;
}

TEST(KernelsAppendKv, EveryElement) {
  ASSERT_EQ(tandem_prepare_append_kv(the_gpu()->context()), TANDEM_OK) << tandem_last_error();
  for (const AppendCase& c : append_cases()) EXPECT_EQ(checked(c), "") << c;
}

// Keys whose place is outside the cache are skipped, and positions outside the tables do not rotate.
TEST(KernelsAppendKv, PlacesOutsideAreSkipped) {
  const std::vector<int64_t> slots = {80, 3, INT64_MAX, -1, INT64_MIN, 79, int64_t{1} << 32, 81};
  EXPECT_EQ(checked({.places = Places::slots, .slots = slots}), "");
  const AppendCase pages{.heads_q = 2,
                         .rotary_dim = 64,
                         .new_keys = {4, 20, 3, 5},
                         .cached = {5, 30, 0, 9},
                         .packed = true,
                         .batch_idx = true};
  AppendCase rows = pages, dense = pages;
  rows.places = Places::rows;
  dense.packed = false, dense.new_keys = {4, 4, 4, 4};
  for (const AppendCase& c : {pages, rows, dense}) {
    for (const int32_t value : {-1, INT32_MIN, INT32_MAX, 1000, 93}) {
      const auto set = [&](Tensor AppendInstance::*list, int64_t n) {
        EXPECT_EQ(checked(c, [&](AppendInstance& x) { (x.*list).set(n, value); }), "") << value << " " << n << " " << c;
      };
      set(&AppendInstance::cache_seqlens, 1);
      set(&AppendInstance::cache_batch_idx, 2);
      if (c.places == Places::pages) set(&AppendInstance::page_table, 5);
    }
  }
}

// Any values of cu_seqlens stay inside all tensors.
TEST(KernelsAppendKv, AnySumsStayInside) {
  const AppendCase c{.heads_q = 2, .rotary_dim = 64, .new_keys = {4, 20, 3}, .cached = {5, 30, 0}, .packed = true};
  for (const int32_t value : {-1, INT32_MIN, INT32_MAX, 13}) {
    for (const int64_t n : {0, 1, 3}) {
      AppendInstance x(c);
      x.cu_seqlens.set(n, value);
      EXPECT_NO_THROW(append_on(*the_gpu(), x)) << value << " at " << n;
      for (const Tensor* t : x.tensors()) EXPECT_TRUE(t->guards_intact()) << value << " at " << n;
    }
  }
}

TEST(KernelsAppendKv, WhatIsNotServedIsRefused) {
  EXPECT_NE(checked({.type = DType::f64, .table = DType::f64}).find("k.dtype (float64) must be float32"),
            std::string::npos);
}

}  // namespace
}  // namespace tandem::test
