// Appending to a cache on the CPU.
#include <gtest/gtest.h>

#include "support/append_case.h"

namespace tandem::test {
namespace {

tandem_status append_on_cpu(AppendInstance& instance) {
  const tandem_append_kv_args args = instance.args();
  return tandem_append_kv(nullptr, &args, nullptr);
}

TEST(CpuAppendKv, EveryElement) {
  std::vector<AppendCase> cases = append_cases();
  cases.push_back({.type = DType::f64, .table = DType::f64, .heads_q = 2, .rotary_dim = 32});
  for (const AppendCase& c : cases) {
    EXPECT_EQ(check_append(c, [](AppendInstance& x) { EXPECT_EQ(append_on_cpu(x), TANDEM_OK) << tandem_last_error(); }),
              "")
        << c;
  }
}

struct BadValue {
  AppendCase c;
  void (*spoil)(AppendInstance&);
  const char* says;
};

// Values that a GPU skips are refused before anything is written.
TEST(CpuAppendKv, PlacesOutsideAreRefused) {
  const AppendCase pages{.heads_q = 2, .rotary_dim = 32},
      slots{.places = Places::slots, .rotary_dim = 32, .slots = {1, 2}};
  AppendCase packed = pages, indexed = pages;
  packed.packed = indexed.batch_idx = true;
  const BadValue bad[] = {
      {slots, [](AppendInstance& x) { x.slot_mapping.set(1, 80); }, "slot_mapping[1] (80) must be below"},
      {slots, [](AppendInstance& x) { x.positions.set(1, 96); },
       "rotary_cos.table_rows (96) must be above position 96"},
      {slots, [](AppendInstance& x) { x.positions.set(1, -1); }, "positions[1] (-1) must be at least 0"},
      {pages, [](AppendInstance& x) { x.cache_seqlens.set(0, -1); }, "cache_seqlens[0] (-1) must be 0 to"},
      {pages, [](AppendInstance& x) { x.cache_seqlens.set(1, 46); }, "cache_seqlens[1] (46) must be 0 to 45"},
      {pages, [](AppendInstance& x) { x.page_table.set(0, -1); }, "page_table[0, 0] (-1) must be at least 0"},
      {pages, [](AppendInstance& x) { x.page_table.set(5, 9); },
       "page_table[1, 2] (9) must be at least 0 and below k_cache.pages (9)"},
      {indexed, [](AppendInstance& x) { x.cache_batch_idx.set(0, 4); },
       "cache_batch_idx[0] (4) must be at least 0 and below 4"},
      {packed, [](AppendInstance& x) { x.cu_seqlens.set(0, 1); }, "cu_seqlens_new[0] (1) must be 0"},
      {packed, [](AppendInstance& x) { x.cu_seqlens.set(1, 7); }, "cu_seqlens_new[1] (7) must be 0 to 6"},
      {packed, [](AppendInstance& x) { x.cu_seqlens.set(2, 2); }, "cu_seqlens_new[2] (2) must be 3 to 6"},
  };
  for (const BadValue& b : bad) {
    AppendInstance x(b.c), before(b.c);
    b.spoil(x), b.spoil(before);
    EXPECT_EQ(append_on_cpu(x), TANDEM_INVALID_ARGUMENT) << b.says;
    EXPECT_NE(std::string(tandem_last_error()).find(b.says), std::string::npos) << tandem_last_error() << "\n"
                                                                                << b.says;
    EXPECT_EQ(x.k_cache.fingerprint(), before.k_cache.fingerprint());
  }
}

}  // namespace
}  // namespace tandem::test
