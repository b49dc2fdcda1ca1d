// wgmma. PTX ISA, "Asynchronous Warpgroup Level Matrix Instructions".
//
// Each warp issues its quarter when it executes the instruction. The product may complete after all four quarters and
// after the warpgroup's earlier products.
#include "vgpu/src/machine/instructions/wgmma.h"

#include "vgpu/src/machine/run/execute.h"
#include "vgpu/src/machine/run/resolve.h"

namespace tandem::vgpu::machine {
namespace {

using ptx::Instruction;
using ptx::Operand;
using ptx::Type;

constexpr int kWarps = 4;

size_t row_of(int32_t at) { return static_cast<size_t>(at) / (4 * kLanes); }

Step fence_op(Context& context, const Op& op) {
  if (!is_whole(context, op)) return Step::end;
  ++context.warp.fences;
  if (context.grid.observer != nullptr) context.grid.observer->wgmma_fence(context.actor(op));
  return Step::next;
}

Step commit_op(Context& context, const Op& op) {
  if (!is_whole(context, op)) return Step::end;
  ++context.warp.groups_committed;
  context.warp.commit_marks.push_back(context.warp.mma_issued);
  if (context.grid.observer != nullptr) context.grid.observer->group_commits(context.actor(op), AsyncKind::wgmma);
  return Step::next;
}

// The registers of D, by warp.
struct SumRegisters {
  uint32_t* rows[kWarps][128];
  uint32_t** lists[kWarps];

  SumRegisters(const Block& block, size_t group, const WgmmaDetail& detail) {
    for (size_t w = 0; w < kWarps; ++w) {
      std::byte* const registers = block.warps[group * kWarps + w].registers;
      lists[w] = rows[w];
      for (size_t n = 0; n < detail.out.size(); ++n)
        rows[w][n] = reinterpret_cast<uint32_t*>(registers + detail.out[n]);
    }
  }
};

void multiply(Block& block, size_t group, const Wgmma& wgmma) {
  Warpgroup& warpgroup = *block.warpgroups[group];
  const WgmmaDetail& detail = *wgmma.detail;
  const uint32_t* a[kWarps][units::kWgmmaARegisters];
  const uint32_t** const a_lists[kWarps] = {a[0], a[1], a[2], a[3]};
  for (size_t w = 0; w < kWarps; ++w)
    for (size_t n = 0; n < detail.a_count; ++n)
      a[w][n] = reinterpret_cast<const uint32_t*>(block.warps[group * kWarps + w].registers + detail.in[n]);
  const auto* const a_rows = detail.form.a_in_registers ? a_lists : nullptr;
  const units::WgmmaOperands operands = {wgmma.a_tile, a_rows, wgmma.b_tile, block.shared.data()};
  const bool same = warpgroup.unwritten != nullptr && warpgroup.unwritten->form.n == detail.form.n &&
                    warpgroup.unwritten->out == detail.out;
  if (!same) write_sums(block, group);
  if (detail.form.d != units::Sum::f32) {
    write_sums(block, group);
    const SumRegisters d(block, group, detail);
    units::wgmma(detail.form, operands, wgmma.accumulate, d.lists);
    return;
  }
  warpgroup.sums.resize(units::kWgmmaSums);
  float* const sums = warpgroup.sums.data();
  if (!same && wgmma.accumulate) units::load_sums(detail.form, SumRegisters(block, group, detail).lists, sums);
  units::wgmma_sums(detail.form, operands, wgmma.accumulate, sums);
  warpgroup.unwritten = &detail;
}

struct WaitDetail : Detail {
  uint32_t pending = 0;
};

Step wait_op(Context& context, const Op& op) {
  Warp& warp = context.warp;
  if (!context.fragment.tried && !is_whole(context, op)) return Step::end;
  const uint32_t pending = op.as<WaitDetail>().pending;
  const uint32_t group = warp.groups_committed > pending ? warp.groups_committed - pending : 0;
  const uint64_t needed = group == 0 ? 0 : warp.commit_marks[group - 1];
  const auto number = static_cast<size_t>(warp.index / kWarps);
  if (context.block.warpgroups[number]->completed < needed) return context.wait(WaitKind::wgmma, needed);
  write_sums(context.block, number);
  warp.fences_at_wait = warp.fences;
  warp.groups_waited = std::max(warp.groups_waited, group);
  warp.holds = needed < warp.mma_issued || warp.loads_waited < warp.loads_issued;
  if (context.grid.observer != nullptr)
    context.grid.observer->group_waits(context.actor(op), AsyncKind::wgmma, pending, false);
  return Step::next;
}

// Registers of a wgmma must be untouched since the last wgmma.fence, except accumulators of the preceding wgmma. If
// accumulators are written after the fence of their stage, the compiler waits for earlier products, which is slow but
// correct.
bool check_registers(Context& context, const Op& op, const WgmmaDetail& detail) {
  const Warp& warp = context.warp;
  const uint32_t* const touched = warp.touched.data();
  const auto late = [&](const std::vector<int32_t>& registers, size_t count) {
    for (size_t n = 0; n < count; ++n)
      if (touched[row_of(registers[n])] >= warp.fences) return true;
    return false;
  };
  const bool late_a = late(detail.in, detail.a_count);
  if (late_a || late(detail.out, detail.out.size())) {
    if (late_a || warp.fences == warp.fences_at_wait)
      context.finds(
          Rule::missing_wgmma_fence, op, "",
          "an instruction has accessed a register of the product since the last wgmma.fence, or no fence has run");
    else
      context.finds(Rule::late_wgmma_write, op, "",
                    "an instruction has accessed an accumulator register of the product after the wgmma.fence");
  }
  for (size_t n = 0; n < detail.a_count && detail.form.a_in_registers; ++n) {
    if (warp.mma_writes[row_of(detail.in[n])] <= warp.groups_waited) continue;
    if (!context.finds(Rule::pending_register, op, "",
                       "an outstanding wgmma writes a register of A, and no wgmma.wait_group covers that wgmma yet"))
      return false;
  }
  return true;
}

void hold_registers(Warp& warp, const WgmmaDetail& detail) {
  const uint32_t group = warp.groups_committed + 1;
  uint32_t* const writes = warp.mma_writes.data();
  for (const int32_t at : detail.out) writes[row_of(at)] = group;
  if (detail.form.a_in_registers)
    for (size_t n = 0; n < detail.a_count; ++n) warp.mma_reads[row_of(detail.in[n])] = group;
  warp.holds = true;
}

// Computes the product of the oldest wgmma of a warpgroup.
void complete(Block& block, size_t group, AsyncOp* self) {
  Warpgroup& warpgroup = *block.warpgroups[group];
  Wgmma wgmma = std::move(warpgroup.under_way.front());
  warpgroup.under_way.pop_front();
  ++warpgroup.completed;
  Grid& grid = *block.cluster->grid;
  if (self->moves_data) multiply(block, group, wgmma);
  if (!wgmma.copies.empty()) write_sums(block, group);
  for (const LateCopy& copy : wgmma.copies) {
    std::byte* const registers = block.warps[group * kWarps + static_cast<size_t>(copy.warp)].registers;
    const auto* from = reinterpret_cast<const uint32_t*>(registers + copy.from);
    auto* to = reinterpret_cast<uint32_t*>(registers + copy.to);
    TANDEM_EACH_LANE(lane, copy.lanes) to[lane] = from[lane];
  }
  if (grid.observer != nullptr && self->announced) grid.observer->async_completes(self->id);
}

// Begins the instruction when the first of the four warps executes it.
bool begin(Context& context, const Op& op, const WgmmaDetail& detail, Warpgroup& warpgroup) {
  const auto lane = static_cast<uint32_t>(first_lane(context.mask));
  const size_t group = static_cast<size_t>(context.warp.index / kWarps);
  Wgmma wgmma;
  wgmma.detail = &detail;
  const auto descriptor = [&](int32_t n) { return context.row<uint64_t>(detail.in[static_cast<size_t>(n)])[lane]; };
  wgmma.b = descriptor(detail.b_at);
  wgmma.accumulate = (*context.row(detail.in[static_cast<size_t>(detail.adds_if)]) >> lane & 1) != 0;
  Status status = units::b_tile(detail.form, wgmma.b, context.grid.window_bytes, &wgmma.b_tile);
  if (status.ok() && !detail.form.a_in_registers) {
    wgmma.a = descriptor(0);
    status = units::a_tile(detail.form, wgmma.a, context.grid.window_bytes, &wgmma.a_tile);
  }
  if (!status.ok()) {
    context.finds(Rule::invalid_descriptor, op, "", status.message, true);
    return false;
  }
  std::vector<AsyncRef> after;
  if (!warpgroup.under_way.empty()) after.push_back(warpgroup.under_way.back().op);
  wgmma.op = context.cluster.async.issue(context.actor(op), nullptr, after, kWarps);
  wgmma.op->blocks = 1u << context.block.rank;
  Block* const block = &context.block;
  wgmma.op->complete = [block, group, self = wgmma.op.get()] { complete(*block, group, self); };
  warpgroup.under_way.push_back(std::move(wgmma));
  return true;
}

// The 16 rows of A that one of the four warps multiplies.
units::MatrixTile rows_of(const units::MatrixTile& a, uint32_t warp) {
  units::MatrixTile rows = a;
  rows.mn = 16;
  units::MatrixDescriptor& d = rows.descriptor;
  if (!a.mn_major) {
    d.start += 2 * warp * d.stride;  // groups of 8 rows
    return rows;
  }
  // Chunks of 8 rows, adjacent in the span of the swizzle.
  const uint32_t chunks = d.swizzle == units::MatrixSwizzle::b32 ? 2 : d.swizzle == units::MatrixSwizzle::b64 ? 4 : 8;
  if (d.swizzle == units::MatrixSwizzle::none)
    d.start += 2 * warp * d.stride;
  else
    d.start += 2 * warp / chunks * d.leading + 2 * warp % chunks * 16;
  return rows;
}

void add_spans(const units::MatrixTile& tile, int32_t cta, int32_t warp, std::vector<Span>* spans) {
  std::vector<units::Range> ranges;
  units::list_ranges(tile, &ranges);
  for (const units::Range& r : ranges) spans->push_back({Memory::shared, cta, r.address, r.bytes, 1, warp});
}

// Each warp has an event. The last event names all reads.
void announce(Context& context, const Op& op, const WgmmaDetail& detail, const Wgmma& wgmma) {
  if (context.grid.observer == nullptr) return;
  std::vector<Span> reads;
  if (wgmma.issued_by == (1u << kWarps) - 1) {
    const int32_t first = context.warp.index / kWarps * kWarps;
    add_spans(wgmma.b_tile, context.block.cta, -1, &reads);
    for (int32_t w = 0; w < kWarps && !detail.form.a_in_registers; ++w)
      add_spans(rows_of(wgmma.a_tile, static_cast<uint32_t>(w)), context.block.cta, first + w, &reads);
  }
  wgmma.op->announced = true;
  const bool moves = context.grid.observer->async_issues(context.actor(op), AsyncKind::wgmma, wgmma.op->id, reads, {});
  wgmma.op->moves_data = wgmma.op->moves_data && moves;
}

Step mma_op(Context& context, const Op& op) {
  const auto& detail = op.as<WgmmaDetail>();
  Warp& warp = context.warp;
  if (!is_whole(context, op, Exited::matter)) return Step::end;
  const int group = warp.index / kWarps, member = warp.index % kWarps;
  if ((group + 1) * kWarps > context.grid.warps) {
    context.finds(Rule::divergent_aligned, op, "",
                  "the last " + std::to_string(context.grid.warps % kWarps) +
                      " warps of the block must form a whole warpgroup: launch a multiple of 128 threads",
                  true);
    return Step::end;
  }
  if (!check_registers(context, op, detail)) return Step::end;
  Warpgroup& warpgroup = *context.block.warpgroups[static_cast<size_t>(group)];
  const uint64_t place = warp.mma_issued++ - warpgroup.completed;
  if (place == warpgroup.under_way.size() && !begin(context, op, detail, warpgroup)) return Step::end;
  Wgmma& wgmma = warpgroup.under_way[place];
  if (wgmma.detail != &detail) {
    context.finds(Rule::divergent_aligned, op, "", "the warps of a warpgroup execute different wgmma instructions",
                  true);
    return Step::end;
  }
  wgmma.issued_by |= 1u << member;
  hold_registers(warp, detail);
  announce(context, op, detail, wgmma);
  const AsyncRef async = wgmma.op;  // completing ends the entry
  context.cluster.async.unblock(async);
  ++context.cluster.events;
  context.cluster.async.advance(&context.cluster.random);
  return Step::next;
}

units::Format format_of(Type type) {
  switch (type) {
    case Type::f16: return units::Format::f16;
    case Type::bf16: return units::Format::bf16;
    case Type::tf32: return units::Format::tf32;
    case Type::e4m3: return units::Format::e4m3;
    case Type::e5m2: return units::Format::e5m2;
    case Type::s8: return units::Format::s8;
    case Type::u8: return units::Format::u8;
    default: return units::Format::f32;
  }
}

// Parses ".m64n128k16" to n and k.
bool take_shape(const std::string& word, units::WgmmaForm* form) {
  int m = 0;
  return std::sscanf(word.c_str(), "m%dn%dk%d", &m, &form->n, &form->k) == 3 && m == 64;
}

// The operands are followed by scale-d, then the signs of A and B (floating point), then their transposition (16 bits).
Status take_flags(Builder& b, const Instruction& i, WgmmaDetail* detail) {
  const auto flag = [&](size_t n) { return static_cast<int64_t>(i.operands[n].bits); };
  units::WgmmaForm& form = detail->form;
  const size_t count = i.operands.size();
  for (size_t n = 4; n < count; ++n)
    if (i.operands[n].kind != Operand::Kind::integer)
      return b.refuse(i, "the last operands must be constants: write numbers");
  if (count > 4) {
    if (count < 6) return b.refuse(i, "must have the operands that PTX defines: correct the operands");
    for (size_t n = 4; n < 6; ++n)
      if (flag(n) != 1 && flag(n) != -1)
        return b.refuse(i, "the scales of A and B must be 1 or -1: correct the operands");
    form.negate_a = flag(4) == -1;
    form.negate_b = flag(5) == -1;
  }
  const size_t transposed = form.a_in_registers ? 1 : 2;
  if (count > 6) {
    if (count != 6 + transposed) return b.refuse(i, "must have the operands that PTX defines: correct the operands");
    if (transposed == 2) form.transpose_a = flag(6) != 0;
    form.transpose_b = flag(count - 1) != 0;
  }
  return {};
}

Status mma_async(Builder& b, const Instruction& i, Modifiers& words) {
  auto detail = std::make_unique<WgmmaDetail>();
  units::WgmmaForm& form = detail->form;
  if (words.take("sp")) return b.refuse(i, "must not be sparse: use the dense form");
  const std::string shape = words.take_prefix("m64");
  form.saturate = words.take("satfinite");
  const Type d = words.take_type(), a = words.take_type(), bt = words.take_type();
  TANDEM_TRY(b.unknown(i, words));
  if (bt == Type::none || !take_shape(shape, &form) || i.operands.size() < 4)
    return b.refuse(i, "must have a form that the virtual GPU executes: use another form");
  form.d = d == Type::f16 ? units::Sum::f16 : d == Type::s32 ? units::Sum::s32 : units::Sum::f32;
  form.a = format_of(a);
  form.b = format_of(bt);
  form.a_in_registers = i.operands[1].kind == Operand::Kind::vector;
  TANDEM_TRY(take_flags(b, i, detail.get()));
  const Status status = units::check(form);
  if (!status.ok()) return b.refuse(i, status.message);
  if (i.operands[0].kind != Operand::Kind::vector ||
      i.operands[0].parts.size() != static_cast<size_t>(units::d_registers(form)))
    return b.refuse(i, "D has " + std::to_string(units::d_registers(form)) + " registers: correct the list");
  if (form.a_in_registers) {
    if (i.operands[1].parts.size() != units::kWgmmaARegisters)
      return b.refuse(i, "A has 4 registers: correct the list");
    for (const Operand& r : i.operands[1].parts) detail->in.push_back(b.source(r, Type::b32));
    detail->a_count = detail->in.size();
  } else {
    detail->in.push_back(b.source(i.operands[1], Type::b64));
  }
  detail->b_at = static_cast<int32_t>(detail->in.size());
  detail->in.push_back(b.source(i.operands[2], Type::b64));
  detail->adds_if = static_cast<int32_t>(detail->in.size());
  detail->in.push_back(b.predicate(i.operands[3]));
  for (const Operand& r : i.operands[0].parts) {
    const int32_t reg = b.destination(r, Type::b32);
    detail->in.push_back(reg);  // the accumulators
    detail->out.push_back(reg);
    detail->held.push_back(reg);
  }
  for (size_t n = 0; n < detail->a_count; ++n) detail->held.push_back(detail->in[n]);
  if (b.failed()) return b.fail(i);
  detail->holds = Hold::mma;
  b.emit(mma_op, std::move(detail));
  return {};
}

Status wgmma_family(Builder& b, const Instruction& i) {
  if (!b.model().wgmma) return b.refuse(i, std::string(b.model().name) + " has no wgmma: run the kernel on vgpu:h200");
  Modifiers words(i);
  const std::string what = words.take_of({"mma_async", "fence", "commit_group", "wait_group"});
  words.take("sync");
  words.take("aligned");
  b.code().uses_wgmma = true;
  if (what == "mma_async") return mma_async(b, i, words);
  TANDEM_TRY(b.unknown(i, words));
  if (what == "fence") {
    b.emit(fence_op, nullptr);
  } else if (what == "commit_group") {
    auto detail = std::make_unique<Detail>();
    detail->commits = true;
    b.emit(commit_op, std::move(detail));
  } else if (what == "wait_group" && i.operands.size() == 1 && i.operands[0].kind == Operand::Kind::integer) {
    auto detail = std::make_unique<WaitDetail>();
    detail->pending = static_cast<uint32_t>(i.operands[0].bits);
    if (detail->pending == 0) detail->releases = Hold::mma;
    b.emit(wait_op, std::move(detail));
  } else {
    return b.refuse(i, "must have a form that the virtual GPU executes: use another form");
  }
  return {};
}

}  // namespace

void write_sums(Block& block, size_t group) {
  Warpgroup& warpgroup = *block.warpgroups[group];
  if (warpgroup.unwritten == nullptr) return;
  const WgmmaDetail& detail = *std::exchange(warpgroup.unwritten, nullptr);
  units::store_sums(detail.form, warpgroup.sums.data(), SumRegisters(block, group, detail).lists);
}

bool writes_register(const Wgmma& wgmma, int32_t at) {
  const auto& out = wgmma.detail->out;
  return std::find(out.begin(), out.end(), at) != out.end();
}

Status decode_wgmma(Builder& b, const Instruction& i) { return wgmma_family(b, i); }

}  // namespace tandem::vgpu::machine
