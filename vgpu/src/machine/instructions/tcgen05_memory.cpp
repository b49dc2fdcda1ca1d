// Tensor memory: its allocation, loads and stores, and the instructions that wait for them.
#include <cstring>

#include "vgpu/src/machine/instructions/tcgen05.h"
#include "vgpu/src/machine/run/execute.h"
#include "vgpu/src/machine/run/resolve.h"
#include "vgpu/src/units/tensor_memory.h"

namespace tandem::vgpu::machine {
namespace {

using ptx::Instruction;
using ptx::Operand;
using ptx::Type;

constexpr uint32_t kUnit = 32;  // columns
constexpr uint32_t kUnits = units::kTmemColumns / kUnit;
// The bits of an address that select one of four warps. Hardware ignores these bits in loads and stores.
constexpr uint32_t kQuadrantShift = 21, kQuadrantBits = 3u << kQuadrantShift;

bool is_count(uint32_t columns) { return columns >= 32 && columns <= 512 && (columns & (columns - 1)) == 0; }

// Returns columns that are free in all of the blocks, or 512 if no columns are free.
uint32_t find_columns(const std::vector<Block*>& blocks, uint32_t columns) {
  const uint32_t wanted = columns / kUnit;
  for (uint32_t at = 0; at + wanted <= kUnits; ++at) {
    bool free = true;
    for (const Block* block : blocks)
      for (uint32_t n = at; n < at + wanted; ++n) free = free && !block->tmem_used[n];
    if (free) return at * kUnit;
  }
  return units::kTmemColumns;
}

void mark_columns(Block& block, uint32_t column, uint32_t columns, bool used) {
  for (uint32_t n = column / kUnit; n < (column + columns) / kUnit; ++n) block.tmem_used[n] = used;
}

enum class Management : uint8_t { alloc, dealloc, relinquish };
struct ManagementDetail : Detail {  // in: the address and the columns
  Management what = Management::alloc;
  int32_t group = 1;
  AccessForm form;
  bool wide_address = false;
  int64_t offset = 0;
};

// Both blocks of a pair execute it together: the first waits for the other. Returns next when both have arrived.
Step meet_peer(Context& context, const Op& op, const ManagementDetail& detail, std::vector<Block*>* blocks) {
  blocks->push_back(&context.block);
  if (detail.group != 2) return Step::next;
  Block* const peer = peer_of(context, op);
  if (peer == nullptr) return Step::end;
  blocks->push_back(peer);
  // Each block counts its steps; both must have the same count.
  if (!context.fragment.tried) {
    context.fragment.state = ++context.block.pair_steps;
    ++context.cluster.events;
  }
  if (peer->pair_steps < context.fragment.state) return context.wait(WaitKind::pair);
  return Step::next;
}

Step write_address(Context& context, const Op& op, const ManagementDetail& detail, uint32_t column) {
  const uint32_t all = context.mask;
  context.mask = 1u << first_lane(all);  // the store of one thread
  Places places;
  const bool ok = resolve(context, op, detail.form, {detail.in[0], detail.wide_address, detail.offset}, &places);
  const auto lane = static_cast<uint32_t>(first_lane(all));
  if (ok && (places.nothing >> lane & 1) == 0) std::memcpy(places.at[lane], &column, 4);
  context.mask = all;
  ++context.cluster.events;
  return ok ? Step::next : Step::end;
}

Step alloc(Context& context, const Op& op, const ManagementDetail& detail, uint32_t columns,
           const std::vector<Block*>& blocks) {
  Block& block = context.block;
  // The first block of a pair that arrives allocates for both.
  if (block.tmem_given.empty()) {
    const uint32_t column = find_columns(blocks, columns);
    if (column == units::kTmemColumns) return context.wait(WaitKind::tmem_columns, columns);
    for (Block* b : blocks) {
      mark_columns(*b, column, columns, true);
      b->tmem_given.push_back(column);
    }
  }
  const uint32_t column = block.tmem_given.front();
  block.tmem_given.erase(block.tmem_given.begin());
  const int32_t peer = blocks.size() == 2 ? blocks[1]->cta : -1;
  if (context.grid.observer != nullptr) context.grid.observer->tmem_allocates(context.actor(op), column, columns, peer);
  return write_address(context, op, detail, column);
}

Step dealloc(Context& context, const Op& op, uint32_t address, uint32_t columns) {
  const uint32_t column = address & 0xffff;
  bool used = column % kUnit == 0 && column + columns <= units::kTmemColumns;
  for (uint32_t n = column / kUnit; used && n < (column + columns) / kUnit; ++n) used = context.block.tmem_used[n];
  if (!used) {
    return context.finds(Rule::tmem_unallocated, op,
                         str_cat("tensor memory columns ", column, " to ", column + columns - 1),
                         "the instruction frees columns that are not allocated: free the allocated columns only")
               ? Step::next
               : Step::end;
  }
  mark_columns(context.block, column, columns, false);
  ++context.cluster.events;
  if (context.grid.observer != nullptr) context.grid.observer->tmem_frees(context.actor(op), column, columns);
  return Step::next;
}

Step management_op(Context& context, const Op& op) {
  const auto& detail = op.as<ManagementDetail>();
  if (!context.fragment.tried && (!is_whole(context, op) || !use_group(context, op, detail.group))) return Step::end;
  const auto lane = static_cast<uint32_t>(first_lane(context.mask));
  uint32_t columns = 0;
  if (detail.what != Management::relinquish) {
    columns = context.row(detail.in[1])[lane];
    if (!is_count(columns)) {
      context.finds(Rule::invalid_shape, op, "",
                    str_cat(columns, " columns must be 32, 64, 128, 256 or 512: round the number up"), true);
      return Step::end;
    }
  }
  if (detail.what == Management::alloc && context.block.tmem_relinquished && !context.fragment.tried &&
      !context.finds(Rule::tmem_unallocated, op, "",
                     "the block has given up the right to allocate: allocate before relinquish_alloc_permit"))
    return Step::end;
  std::vector<Block*> blocks;
  const Step met = meet_peer(context, op, detail, &blocks);
  if (met != Step::next) return met;
  switch (detail.what) {
    case Management::alloc: return alloc(context, op, detail, columns, blocks);
    case Management::dealloc: return dealloc(context, op, context.row(detail.in[0])[lane], columns);
    default: context.block.tmem_relinquished = true; return Step::next;
  }
}

Status management(Builder& b, const Instruction& i, Modifiers& words, const std::string& what) {
  auto detail = std::make_unique<ManagementDetail>();
  detail->group = take_group(words);
  for (const char* word : {"sync", "aligned", "b32"}) words.take(word);
  const bool shared = !words.take_of({"shared::cta", "shared"}).empty();
  TANDEM_TRY(b.unknown(i, words));
  if (detail->group == 0) return b.refuse(i, "must name .cta_group: add the modifier");
  if (what == "relinquish_alloc_permit") {
    detail->what = Management::relinquish;
  } else {
    if (i.operands.size() != 2) return b.refuse(i, "must have the operands that PTX defines: correct the operands");
    if (what == "alloc") {
      detail->form.space = shared ? ptx::Space::shared : ptx::Space::generic;
      detail->form.writes = true;
      detail->form.bytes = detail->form.alignment = 4;
      detail->in.push_back(b.address(i.operands[0], &detail->offset));
      if (!b.failed()) detail->wide_address = b.width(detail->in[0]) == 8;
    } else {
      detail->what = Management::dealloc;
      detail->in.push_back(b.source(i.operands[0], Type::b32));
    }
    detail->in.push_back(b.source(i.operands[1], Type::b32));
  }
  if (b.failed()) return b.fail(i);
  b.emit(management_op, std::move(detail));
  return {};
}

struct AccessDetail : Detail {  // ld: in: address; out: registers. st: in: address, registers
  units::TmemAccess access;
  bool loads = false;
  int32_t offset = 0;
};

bool begin_access(Context& context, const Op& op, const AccessDetail& detail, uint32_t* address,
                  std::vector<units::CellRange>* cells) {
  if (!is_whole(context, op)) return false;
  const int quadrant = context.warp.index % 4;
  *address = context.row(detail.in[0])[first_lane(context.mask)] + static_cast<uint32_t>(detail.offset);
  if (const uint32_t own = (*address & ~kQuadrantBits) | static_cast<uint32_t>(quadrant) << kQuadrantShift;
      own != *address) {
    context.finds(Rule::tmem_quadrant, op, str_cat("tensor memory lane ", *address >> 16),
                  str_cat("the lanes of this warp are 32 from ", 32 * quadrant,
                          " on, and hardware uses these lanes for any address"));
    *address = own;
  }
  const Status status = units::check(detail.access, *address, quadrant);
  if (!status.ok()) {
    context.finds(Rule::tmem_unallocated, op, "", status.message, true);
    return false;
  }
  units::list_ranges(detail.access, *address, cells);
  return check_cells(context, op, context.block, *cells);
}

AsyncRef issue_access(Context& context, const Op& op, const AccessDetail& detail,
                      const std::vector<units::CellRange>& cells, std::function<void()> move) {
  // The operation follows the warp's own stores, because loads and stores of a warp use one pipe.
  const AsyncRef made = context.cluster.async.issue(context.actor(op), nullptr, context.warp.tmem_pending_stores);
  Observer* const observer = context.grid.observer;
  if (observer != nullptr) {
    std::vector<Span> spans;
    add_cells(context.block, cells, &spans);
    const std::span<const Span> none;
    made->moves_data = detail.loads
                           ? observer->async_issues(made->issuer, AsyncKind::tcgen05_ld, made->id, spans, none)
                           : observer->async_issues(made->issuer, AsyncKind::tcgen05_st, made->id, none, spans);
  }
  made->complete = [observer, self = made.get(), move = std::move(move)] {
    if (self->moves_data) move();
    if (observer != nullptr) observer->async_completes(self->id);
  };
  ++context.cluster.events;
  return made;
}

void keep(std::vector<AsyncRef>* list, const AsyncRef& op) {
  std::erase_if(*list, [](const AsyncRef& o) { return o->done; });
  list->push_back(op);
}

Step load_op(Context& context, const Op& op) {
  const auto& detail = op.as<AccessDetail>();
  uint32_t address;
  std::vector<units::CellRange> cells;
  if (!begin_access(context, op, detail, &address, &cells)) return Step::end;
  Warp& warp = context.warp;
  ++warp.loads_issued;
  for (const int32_t at : detail.out) warp.tmem_loads[static_cast<size_t>(at) / (4 * kLanes)] = warp.loads_issued;
  warp.holds = true;
  Block* const block = &context.block;
  std::byte* const registers = warp.registers;
  keep(&warp.tmem_pending_ops, issue_access(context, op, detail, cells, [&detail, block, registers, address] {
    uint32_t* rows[128];
    for (size_t n = 0; n < detail.out.size(); ++n) rows[n] = reinterpret_cast<uint32_t*>(registers + detail.out[n]);
    units::load_tmem(detail.access, *block->tensor_memory, address, rows);
  }));
  context.cluster.async.advance(&context.cluster.random);
  return Step::next;
}

Step store_op(Context& context, const Op& op) {
  const auto& detail = op.as<AccessDetail>();
  uint32_t address;
  std::vector<units::CellRange> cells;
  if (!begin_access(context, op, detail, &address, &cells)) return Step::end;
  // Registers are read at issue, because the compiler may reuse them afterwards.
  std::vector<uint32_t> values((detail.in.size() - 1) * kLanes);
  for (size_t n = 1; n < detail.in.size(); ++n)
    std::memcpy(values.data() + (n - 1) * kLanes, context.row(detail.in[n]), 4 * kLanes);
  Block* const block = &context.block;
  keep(&context.warp.tmem_pending_stores,
       issue_access(context, op, detail, cells, [&detail, block, address, values = std::move(values)] {
         const uint32_t* rows[128];
         for (size_t n = 0; n + 1 < detail.in.size(); ++n) rows[n] = values.data() + n * kLanes;
         units::store_tmem(detail.access, block->tensor_memory.get(), address, rows);
       }));
  context.cluster.async.advance(&context.cluster.random);
  return Step::next;
}

bool take_shape(const std::string& word, units::TmemAccess* access) {
  using Shape = units::TmemAccess::Shape;
  const std::pair<const char*, Shape> shapes[] = {{"32x32b", Shape::s32x32b},
                                                  {"16x64b", Shape::s16x64b},
                                                  {"16x128b", Shape::s16x128b},
                                                  {"16x256b", Shape::s16x256b},
                                                  {"16x32bx2", Shape::s16x32bx2}};
  for (const auto& [name, shape] : shapes) {
    if (word != name) continue;
    access->shape = shape;
    return true;
  }
  return false;
}

Status tmem_access(Builder& b, const Instruction& i, Modifiers& words, bool loads) {
  auto detail = std::make_unique<AccessDetail>();
  detail->loads = loads;
  if (words.take("red")) return b.refuse(i, "a load must not reduce on this target: reduce in registers");
  for (const char* word : {"sync", "aligned", "b32"}) words.take(word);
  const std::string shape = words.take_of({"32x32b", "16x64b", "16x128b", "16x256b", "16x32bx2"}),
                    count = words.take_prefix("x");
  detail->access.pack16 = !words.take_of({"pack::16b", "unpack::16b"}).empty();
  TANDEM_TRY(b.unknown(i, words));
  if (!take_shape(shape, &detail->access) || count.empty()) {
    return b.refuse(i, "must have a form that the virtual GPU executes: use another form");
  }
  detail->access.repeat = std::atoi(count.c_str() + 1);
  const Operand& address = i.operands[loads ? 1 : 0];
  const bool halves = shape == "16x32bx2";  // [address], offset of the second half
  if (halves) {
    const size_t at = loads ? 2 : 1;
    if (i.operands.size() != 3 || i.operands[at].kind != Operand::Kind::integer)
      return b.refuse(i, "must have the offset of the second half: add the operand");
    detail->access.second_offset = static_cast<int32_t>(i.operands[at].bits);
  }
  const Status status = units::check(detail->access);
  if (!status.ok()) return b.refuse(i, status.message);
  int64_t offset = 0;
  detail->in.push_back(b.address(address, &offset, 4));
  detail->offset = static_cast<int32_t>(offset);
  const Operand& list = loads ? i.operands[0] : i.operands.back();
  const std::vector<Operand> registers = list.kind == Operand::Kind::vector ? list.parts : std::vector<Operand>{list};
  if (registers.size() != static_cast<size_t>(units::registers(detail->access)))
    return b.refuse(i,
                    str_cat("the list must have ", units::registers(detail->access), " registers: correct the list"));
  for (const Operand& r : registers) {
    if (loads)
      detail->out.push_back(b.destination(r, Type::b32));
    else
      detail->in.push_back(b.source(r, Type::b32));
  }
  if (b.failed()) return b.fail(i);
  if (loads) {
    detail->held = detail->out;
    detail->holds = Hold::tmem_load;
  }
  b.emit(loads ? Exec(load_op) : Exec(store_op), std::move(detail));
  return {};
}

struct WaitDetail : Detail {
  bool loads = false;
};

Step wait_op(Context& context, const Op& op) {
  const bool loads = op.as<WaitDetail>().loads;
  Warp& warp = context.warp;
  if (!context.fragment.tried && !is_whole(context, op)) return Step::end;
  auto& pending = loads ? warp.tmem_pending_ops : warp.tmem_pending_stores;
  std::erase_if(pending, [](const AsyncRef& o) { return o->done; });
  if (!pending.empty()) return context.wait(WaitKind::tensor_memory);
  if (loads) {
    warp.loads_waited = warp.loads_issued;
    warp.holds = !warp.commit_marks.empty() && warp.groups_waited < warp.groups_committed;
  }
  if (context.grid.observer != nullptr) context.grid.observer->tcgen05_waits(context.actor(op), loads, !loads);
  return Step::next;
}

template <bool Before>
Step fence_op(Context& context, const Op& op) {
  if (context.grid.observer != nullptr) context.grid.observer->tcgen05_fence(context.actor(op), Before);
  return Step::next;
}

}  // namespace

int32_t take_group(Modifiers& words) {
  const std::string group = words.take_of({"cta_group::1", "cta_group::2"});
  return group.empty() ? 0 : group.back() - '0';
}

bool use_group(Context& context, const Op& op, int32_t group) {
  int32_t& before = context.block.cta_group;
  const int32_t had = std::exchange(before, group);
  if (had == 0 || had == group) return true;
  return context.finds(
      Rule::mixed_cta_group, op, "",
      str_cat("the instruction uses .cta_group::", group, ", an earlier instruction .cta_group::", had));
}

Block* peer_of(Context& context, const Op& op) {
  const auto peer = static_cast<size_t>(context.block.rank ^ 1);
  if (peer < context.cluster.blocks.size()) return &context.cluster.blocks[peer];
  context.finds(Rule::invalid_shape, op, "",
                ".cta_group::2 needs a cluster with an even number of blocks: launch such a cluster", true);
  return nullptr;
}

bool check_cells(Context& context, const Op& op, const Block& block, const std::vector<units::CellRange>& cells) {
  for (const units::CellRange& range : cells) {
    for (uint32_t column = range.column; column < uint32_t{range.column} + range.columns; ++column) {
      if (column < units::kTmemColumns && block.tmem_used[column / kUnit]) continue;
      return context.finds(Rule::tmem_unallocated, op,
                           str_cat("tensor memory lane ", range.lane, ", column ", column, " of block ", block.cta),
                           "the instruction accesses a column that is not allocated: allocate the column first");
    }
  }
  return true;
}

void add_cells(const Block& block, const std::vector<units::CellRange>& cells, std::vector<Span>* spans) {
  for (const units::CellRange& r : cells)
    spans->push_back({Memory::tensor, block.cta, uint64_t{r.lane} << 16 | r.column, 4u * r.columns, r.lanes});
}

Status decode_tmem(Builder& b, const Instruction& i) {
  Modifiers words(i);
  const std::string what = words.take_of({"alloc", "dealloc", "relinquish_alloc_permit", "ld", "st", "wait::ld",
                                          "wait::st", "fence::before_thread_sync", "fence::after_thread_sync"});
  b.code().uses_tcgen05 = true;
  if (what == "ld" || what == "st") return tmem_access(b, i, words, what == "ld");
  if (what.starts_with("wait")) {
    words.take("sync");
    words.take("aligned");
    TANDEM_TRY(b.unknown(i, words));
    auto detail = std::make_unique<WaitDetail>();
    detail->loads = what == "wait::ld";
    if (detail->loads) detail->releases = Hold::tmem_load;
    b.emit(wait_op, std::move(detail));
    return {};
  }
  if (what.starts_with("fence")) {
    TANDEM_TRY(b.unknown(i, words));
    b.emit(what == "fence::before_thread_sync" ? Exec(fence_op<true>) : Exec(fence_op<false>), nullptr);
    return {};
  }
  if (what.empty()) return b.refuse(i, "must have a form that the virtual GPU executes: use another form");
  return management(b, i, words, what);
}

}  // namespace tandem::vgpu::machine
