// Chooses the tables for the machine that runs this process.
#include <vector>

#include "base/instruction_set.h"
#include "vgpu/src/units/numbers.h"
#include "vgpu/src/units/product.h"

namespace tandem::vgpu::units {

extern const Rows rows_generic;
extern const Products products_generic;
#if defined(__x86_64__)
extern const Rows rows_avx2, rows_avx512;
extern const Products products_avx2, products_avx512;
#endif

namespace {

// The supported targets, the best first.
template <class Table>
std::vector<const Table*> runnable(std::initializer_list<const Table*> all) {
  std::vector<const Table*> tables;
  for (const Table* table : all)
    for (const std::string_view target : instruction_sets())
      if (target == table->target) tables.push_back(table);
  return tables;
}

// The chosen instruction set may differ from the compiled one in features that this code does not use.
template <class Table>
const Table& choose(std::span<const Table* const> tables) {
  for (const Table* table : tables)
    if (table->target == instruction_set()) return *table;
  return *tables.front();
}

}  // namespace

std::span<const Rows* const> all_rows() {
#if defined(TANDEM_FEW_INSTRUCTION_SETS)
  static const auto tables = runnable<Rows>({&rows_avx512, &rows_generic});
#elif defined(__x86_64__)
  static const auto tables = runnable<Rows>({&rows_avx512, &rows_avx2, &rows_generic});
#else
  static const auto tables = runnable<Rows>({&rows_generic});
#endif
  return tables;
}
const Rows& rows() {
  static const Rows& chosen = choose(all_rows());
  return chosen;
}

std::span<const Products* const> all_products() {
#if defined(TANDEM_FEW_INSTRUCTION_SETS)
  static const auto tables = runnable<Products>({&products_avx512, &products_generic});
#elif defined(__x86_64__)
  static const auto tables = runnable<Products>({&products_avx512, &products_avx2, &products_generic});
#else
  static const auto tables = runnable<Products>({&products_generic});
#endif
  return tables;
}
const Products& products() {
  static const Products& chosen = choose(all_products());
  return chosen;
}

}  // namespace tandem::vgpu::units
