#include "vgpu/src/check/names.h"

#include <algorithm>

#include "base/text.h"
#include "vgpu/src/check/cluster.h"

namespace tandem::vgpu::check {
namespace {

std::string hex(uint64_t x) {
  static constexpr char kDigits[] = "0123456789abcdef";
  std::string text;
  do {
    text.insert(text.begin(), kDigits[x & 15]);
    x >>= 4;
  } while (x);
  return "0x" + text;
}

std::string with_offset(std::string name, uint64_t offset) { return offset ? str_cat(name, " + ", hex(offset)) : name; }

uint64_t aligned(uint64_t at, int32_t alignment) {
  const auto to = static_cast<uint64_t>(std::max(1, alignment));
  return (at + to - 1) / to * to;
}

// Calls f(symbol, offset) for the variables in shared memory: the static variables in their order, then dynamic memory.
template <class F>
void for_each_shared(const Program& program, F&& f) {
  uint64_t at = kReservedShared;
  for (const ptx::Symbol& symbol : program.function().symbols) {
    if (symbol.space != ptx::Space::shared || symbol.is_extern) continue;
    at = aligned(at, symbol.alignment);
    f(symbol, at);
    at += static_cast<uint64_t>(symbol.bytes());
  }
  int32_t alignment = 16;
  for (const ptx::Symbol& symbol : program.function().symbols)
    if (symbol.space == ptx::Space::shared && symbol.is_extern) alignment = std::max(alignment, symbol.alignment);
  for (const ptx::Symbol& symbol : program.function().symbols)
    if (symbol.space == ptx::Space::shared && symbol.is_extern) f(symbol, aligned(at, alignment));
}

}  // namespace

std::string shared_name(const Program& program, uint64_t offset) {
  const ptx::Symbol* symbol = nullptr;
  uint64_t at = 0;
  for_each_shared(program, [&](const ptx::Symbol& s, uint64_t begin) {
    if (begin <= offset && (!symbol || begin >= at)) {
      symbol = &s;
      at = begin;
    }
  });
  if (!symbol) return str_cat("shared memory at ", hex(offset));
  return str_cat(with_offset(symbol->name, offset - at), " (shared ", hex(offset), ")");
}

std::string global_name(const GlobalMemory& memory, uint64_t address) {
  const Buffer* const buffer = memory.nearest(address);
  if (!buffer) return str_cat("global ", hex(address));
  const auto begin = reinterpret_cast<uint64_t>(buffer->address), end = begin + buffer->bytes;
  if (address < begin) return str_cat("global ", hex(address), ", ", begin - address, " bytes before ", buffer->name);
  if (address < end) return with_offset(buffer->name, address - begin);
  if (address == end) return str_cat("global ", hex(address), ", the end of ", buffer->name);
  return str_cat("global ", hex(address), ", ", address - end, " bytes beyond the end of ", buffer->name);
}

std::string tensor_name(uint64_t lane, uint64_t column) {
  return str_cat("tensor memory, lane ", lane, ", column ", column);
}

std::string_view name_of(AsyncKind kind) {
  switch (kind) {
    case AsyncKind::bulk_load: return "bulk load";
    case AsyncKind::bulk_store: return "bulk store";
    case AsyncKind::cp_async: return "cp.async";
    case AsyncKind::st_async: return "st.async";
    case AsyncKind::wgmma: return "wgmma";
    case AsyncKind::tcgen05_mma: return "tcgen05.mma";
    case AsyncKind::tcgen05_cp: return "tcgen05.cp";
    case AsyncKind::tcgen05_shift: return "tcgen05.shift";
    case AsyncKind::tcgen05_ld: return "tcgen05.ld";
    case AsyncKind::tcgen05_st: return "tcgen05.st";
    case AsyncKind::cluster_launch: return "clusterlaunchcontrol";
  }
  return "";
}

std::string name_of(const Accessor& party, int32_t from) {
  std::string name;
  if (party.cta != from && party.cta >= 0) name = str_cat("block ", party.cta, " ");
  if (party.warp >= 0) name += str_cat("warp ", party.warp);
  if (party.lane >= 0) name += str_cat(" lane ", party.lane);
  return name;
}

}  // namespace tandem::vgpu::check
