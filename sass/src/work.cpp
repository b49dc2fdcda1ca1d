#include "sass/src/work.h"

#include <algorithm>
#include <set>
#include <string>

#include "sass/src/units.h"

namespace tandem::machine_code {
namespace {

constexpr std::string_view kRoles[] = {"load",    "mma",       "softmax",  "computing", "correction",
                                       "staging", "reduction", "epilogue", "relay"};

int exponentials_of(const Instruction& i) {
  if (i.base() == "MUFU") return i.has("EX2");
  if (unit_of(i) != Unit::fma || !i.has("RM")) return 0;
  return i.base().ends_with('2') ? 2 : 1;  // FADD2, FFMA2: packed pairs
}

int tensor_columns_of(const Instruction& i) { return static_cast<int>(bytes_of(i)) / (32 * 4); }

void add(const Instruction& i, Work* work) {
  const std::string_view base = i.base();
  work->exponentials += exponentials_of(i);
  work->packs += base == "F2FP";
  work->loads += base == "UTMALDG" || base == "LDGSTS" || i.opcode.starts_with("UBLKCP.S.G");
  work->stores += base == "UTMASTG";
  work->reductions += base == "UBLKRED" || base == "UTMAREDG";
  if (base == "LDTM") work->columns_read += tensor_columns_of(i);
  if (base == "STTM") work->columns_written += tensor_columns_of(i);
  work->votes += base == "VOTE";
  work->semaphores += i.has("STRONG") && i.has("GPU") && !i.has("SYS") && (base == "LDG" || base.starts_with("RED"));
  work->arrivals += base == "SYNCS" && i.has("ARRIVE");
  const bool looks = base == "SYNCS" && i.has("PHASECHK");
  work->waits += looks;
  work->synchronised |= looks || (base == "BAR" && i.has("SYNC")) || base == "DEPBAR" || base == "LDGDEPBAR";
}

}  // namespace

std::string_view name_of(Role role) { return kRoles[static_cast<size_t>(role)]; }

int Work::scores() const {
  const int whole = exponentials / 8 * 8;  // columns come in 16s, and a thread may have half
  return packs == 0 ? whole : std::min(whole, of_gradients ? packs : 2 * packs);
}

std::optional<Role> Work::role() const {
  constexpr int of_softmax = 8;  // fewer exponentials belong to rescaling
  if (products > 0) return exponentials >= of_softmax ? Role::computing : Role::mma;
  if (exponentials >= of_softmax) return Role::softmax;
  if (columns_read > 0 && columns_written > 0) return Role::correction;
  if (loads > 0) return Role::load;
  if (reductions > 0) return Role::reduction;
  if (columns_read > 0 && stores == 0 && waits > 0 && arrivals > 0) return Role::staging;
  if (stores > 0 || columns_read > 0) return Role::epilogue;
  return std::nullopt;
}

Work work_of(const std::vector<Instruction>& code, const std::vector<int32_t>& path) {
  Work work;
  std::set<std::string> fresh;  // registers of sums that begin here
  for (const int32_t i : path) {
    const Instruction& instruction = code[static_cast<size_t>(i)];
    if (is_product(instruction) && begins_sum(instruction)) fresh.insert(instruction.first());
    add(instruction, &work);
  }
  for (const int32_t i : path) {
    const Instruction& product = code[static_cast<size_t>(i)];
    if (!is_product(product)) continue;
    const bool of_scores = in_tensor_memory(product) ? left_in_shared_memory(product) : fresh.contains(product.first());
    ++work.products;
    work.sums += begins_sum(product);
    work.of_scores += of_scores;
    if (of_scores) work.depth = depth_of(product);
    if (!of_scores) work.value_columns = std::max(work.value_columns, columns_of(product));
  }
  return work;
}

}  // namespace tandem::machine_code
