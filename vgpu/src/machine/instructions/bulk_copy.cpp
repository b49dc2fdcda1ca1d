// cp.async.bulk, cp.reduce.async.bulk, st.async, red.async, st.bulk. PTX ISA, chapters of these names.
#include <cstring>

#include "vgpu/src/machine/instructions/bulk.h"
#include "vgpu/src/machine/instructions/memory.h"
#include "vgpu/src/machine/run/execute.h"
#include "vgpu/src/units/box.h"

namespace tandem::vgpu::machine {
namespace {

using ptx::Instruction;
using ptx::Operand;
using ptx::Type;

constexpr uint32_t kGranule = 16;  // sizes and addresses are multiples of this number

struct BulkDetail : Detail {
  Direction direction = Direction::load;
  bool reduces = false;
  units::Reduction reduction = units::Reduction::add;
  gpu::TensorType type = gpu::TensorType::f32;
  bool cluster = false;  // the destination's address has a rank
  AddressOperand to, from, barrier;
  int32_t size = -1, multicast = -1, byte_mask = -1;  // in `in`
};

std::string hex_place(uint64_t address, uint32_t bytes) { return str_cat(bytes, " bytes at ", address); }

// The source or destination of a copy, in global or shared memory.
struct End {
  std::byte* at = nullptr;
  Block* block = nullptr;  // null: global
  uint64_t address = 0;    // the form that observers receive
};

bool is_aligned(Context& context, const Op& op, uint64_t address) {
  return address % kGranule == 0 ||
         context.finds(Rule::misaligned, op, "",
                       "the address of a bulk copy must be a multiple of 16: align the address", true);
}

bool resolve_global_end(Context& context, const Op& op, uint64_t address, uint32_t bytes, End* end) {
  if (!is_aligned(context, op, address)) return false;
  if (address < 0x10000 || address >= kSharedWindow) {
    context.finds(Rule::wrong_space, op, "", "the address is not in global memory: " + hex_place(address, bytes), true);
    return false;
  }
  *end = {reinterpret_cast<std::byte*>(static_cast<uintptr_t>(address)), nullptr, address};
  return true;
}

// cluster: the address has the rank of a block.
bool resolve_shared_end(Context& context, const Op& op, uint64_t address, bool cluster, uint32_t bytes, End* end) {
  if (!is_aligned(context, op, address)) return false;
  SharedPlace place;
  if (!resolve_shared(context, op, address, cluster, bytes, &place)) return false;
  *end = {place.block->shared.data() + place.offset, place.block, place.offset};
  return true;
}

Span span_of(const End& end, uint32_t bytes) {
  if (end.block == nullptr) return {Memory::global, 0, end.address, bytes, 1};
  return {Memory::shared, end.block->cta, end.address, bytes, 1};
}

void copy_bytes(std::byte* to, const std::byte* from, uint32_t bytes, uint32_t byte_mask) {
  if (byte_mask == 0xffff) {
    std::memcpy(to, from, bytes);
    return;
  }
  for (uint32_t i = 0; i < bytes; ++i)
    if (byte_mask >> (i % kGranule) & 1) to[i] = from[i];
}

// Finds the destinations of a load with a multicast mask: the same offset in each block.
bool multicast(Context& context, const Op& op, uint32_t mask, const End& to, std::vector<End>* all) {
  for (size_t rank = 0; rank < 16; ++rank) {
    if ((mask >> rank & 1) == 0) continue;
    if (rank >= context.cluster.blocks.size()) {
      context.finds(Rule::wrong_space, op, "",
                    str_cat("the multicast mask names block rank ", rank,
                            ", which the cluster does not have: clear this bit of the mask"),
                    true);
      return false;
    }
    Block& block = context.cluster.blocks[rank];
    all->push_back({block.shared.data() + to.address, &block, to.address});
  }
  return true;
}

bool issue_lane(Context& context, const Op& op, const BulkDetail& detail, uint32_t lane) {
  const uint32_t bytes = context.row(detail.in[static_cast<size_t>(detail.size)])[lane];
  if (bytes % kGranule != 0 &&
      !context.finds(
          Rule::misaligned, op, "",
          str_cat("a bulk copy of ", bytes, " bytes must have a size that is a multiple of 16: pad the copy"), true))
    return false;
  const bool load = detail.direction == Direction::load, store = detail.direction == Direction::store;
  End to, from;
  const uint64_t source = value_of(context, detail, detail.from, lane);
  const uint64_t target = value_of(context, detail, detail.to, lane);
  if (!(load ? resolve_global_end(context, op, source, bytes, &from)
             : resolve_shared_end(context, op, source, false, bytes, &from)))
    return false;
  if (!(store ? resolve_global_end(context, op, target, bytes, &to)
              : resolve_shared_end(context, op, target, detail.cluster, bytes, &to)))
    return false;
  std::vector<End> destinations;
  if (detail.multicast < 0)
    destinations.push_back(to);
  else if (!multicast(context, op, context.row(detail.in[static_cast<size_t>(detail.multicast)])[lane] & 0xffff, to,
                      &destinations))
    return false;
  Copy copy;
  copy.kind = store ? AsyncKind::bulk_store : AsyncKind::bulk_load;
  copy.reads.push_back(span_of(from, bytes));
  if (from.block != nullptr) copy.blocks |= 1u << from.block->rank;
  for (const End& end : destinations) {
    copy.writes.push_back(span_of(end, bytes));
    if (end.block != nullptr) copy.blocks |= 1u << end.block->rank;
  }
  if (store) {
    copy.group = open_group(context.warp, lane, true);
  } else {
    SharedPlace barrier;
    if (!resolve_shared(context, op, value_of(context, detail, detail.barrier, lane), detail.cluster, 8, &barrier))
      return false;
    if (detail.multicast < 0 && barrier.block != to.block &&
        !context.finds(Rule::invalid_barrier, op, "",
                       "the mbarrier must be in the block that receives the data: use the mbarrier of that block"))
      return false;
    for (const End& end : destinations)
      copy.signals.push_back({detail.multicast < 0 ? barrier.block : end.block, barrier.offset, bytes});
  }
  const uint32_t byte_mask =
      detail.byte_mask < 0 ? 0xffff : context.row(detail.in[static_cast<size_t>(detail.byte_mask)])[lane] & 0xffff;
  copy.move = [&detail, destinations, from, bytes, byte_mask] {
    for (const End& end : destinations) {
      if (detail.reduces)
        units::reduce_elements(detail.reduction, detail.type, end.at, from.at, bytes);
      else
        copy_bytes(end.at, from.at, bytes, byte_mask);
    }
  };
  issue_copy(context, op, lane, std::move(copy));
  return true;
}

Step bulk_op(Context& context, const Op& op) {
  const auto& detail = op.as<BulkDetail>();
  TANDEM_EACH_LANE(lane, context.mask)
  if (!issue_lane(context, op, detail, lane)) return Step::end;
  return context.grid.stopped.load(std::memory_order_relaxed) ? Step::end : Step::next;
}

bool tensor_type(Type type, gpu::TensorType* to) {
  switch (type) {
    case Type::u32: *to = gpu::TensorType::u32; return true;
    case Type::s32: *to = gpu::TensorType::s32; return true;
    case Type::b32: *to = gpu::TensorType::u32; return true;
    case Type::u64:
    case Type::b64: *to = gpu::TensorType::u64; return true;
    case Type::s64: *to = gpu::TensorType::s64; return true;
    case Type::f16: *to = gpu::TensorType::f16; return true;
    case Type::bf16: *to = gpu::TensorType::bf16; return true;
    case Type::f32: *to = gpu::TensorType::f32; return true;
    case Type::f64: *to = gpu::TensorType::f64; return true;
    default: return false;
  }
}

Status take_reduction(Builder& b, const Instruction& i, Modifiers& words, BulkDetail* detail) {
  const std::string names[] = {"add", "min", "max", "inc", "dec", "and", "or", "xor"};
  int n = 0;
  while (n < 8 && !words.take(names[n])) ++n;
  words.take("noftz");
  const Type type = words.take_type();
  detail->reduction = static_cast<units::Reduction>(n);
  if (n == 8 || !tensor_type(type, &detail->type))
    return b.refuse(i, "must have a form that the virtual GPU executes: use another form");
  const Status status = units::check_reduction(detail->reduction, detail->type);
  return status.ok() ? Status() : b.refuse(i, status.message);
}

// Registers are written to another block's memory, and their bytes complete on a barrier there.
struct StoreDetail : Detail {  // in: address, barrier, values
  AddressOperand to, barrier;
  uint32_t element = 4;
  bool reduces = false;
  units::Reduction reduction = units::Reduction::add;
  gpu::TensorType type = gpu::TensorType::u32;
};

Step store_op(Context& context, const Op& op) {
  const auto& detail = op.as<StoreDetail>();
  const auto count = static_cast<uint32_t>(detail.in.size()) - 2, bytes = count * detail.element;
  TANDEM_EACH_LANE(lane, context.mask) {
    SharedPlace to, barrier;
    if (!resolve_shared(context, op, value_of(context, detail, detail.to, lane), true, bytes, &to) ||
        !resolve_shared(context, op, value_of(context, detail, detail.barrier, lane), true, 8, &barrier))
      return Step::end;
    if (to.offset % bytes != 0 && !context.finds(Rule::misaligned, op, "",
                                                 str_cat("the address of a store of ", bytes,
                                                         " bytes must be a multiple of this size: align the address")))
      return Step::end;
    if (barrier.block != to.block &&
        !context.finds(Rule::invalid_barrier, op, "",
                       "the mbarrier must be in the block that receives the data: use the mbarrier of that block"))
      return Step::end;
    std::vector<std::byte> values(bytes);
    for (uint32_t n = 0; n < count; ++n) {
      const std::byte* row = context.row<std::byte>(detail.in[2 + n]);
      std::memcpy(values.data() + n * detail.element, row + lane * detail.element, detail.element);
    }
    Copy copy;
    copy.kind = AsyncKind::st_async;
    copy.writes.push_back({Memory::shared, to.block->cta, to.offset, bytes, 1});
    copy.blocks = 1u << to.block->rank | 1u << barrier.block->rank;
    copy.signals.push_back({barrier.block, barrier.offset, bytes});
    copy.move = [&detail, to, values = std::move(values)] {
      std::byte* const at = to.block->shared.data() + to.offset;
      if (detail.reduces)
        units::reduce_elements(detail.reduction, detail.type, at, values.data(), values.size());
      else
        std::memcpy(at, values.data(), values.size());
    };
    issue_copy(context, op, lane, std::move(copy));
  }
  return context.grid.stopped.load(std::memory_order_relaxed) ? Step::end : Step::next;
}

// st.async and red.async: [to], value(s), [barrier].
Status store_async(Builder& b, const Instruction& i, bool reduces) {
  Modifiers words(i);
  auto detail = std::make_unique<StoreDetail>();
  for (const char* word : {"async", "weak", "relaxed", "cluster", "shared::cluster", "mbarrier::complete_tx::bytes"})
    words.take(word);
  const uint32_t count = take_vector(words);
  detail->reduces = reduces;
  if (reduces) {
    const std::string names[] = {"add", "min", "max", "inc", "dec", "and", "or", "xor"};
    int n = 0;
    while (n < 8 && !words.take(names[n])) ++n;
    if (n == 8) return b.refuse(i, "must be an operation that the virtual GPU executes: use another operation");
    detail->reduction = static_cast<units::Reduction>(n);
  }
  const Type type = words.take_type();
  TANDEM_TRY(b.unknown(i, words));
  if (type == Type::none || width_of(type) > 8 || i.operands.size() != 3)
    return b.refuse(i, "must have a form that the virtual GPU executes: use another form");
  if (reduces && !tensor_type(type, &detail->type))
    return b.refuse(i, "must have a form that the virtual GPU executes: use another form");
  detail->element = static_cast<uint32_t>(width_of(type));
  detail->to = add_address(b, detail.get(), i.operands[0]);
  detail->barrier = add_address(b, detail.get(), i.operands[2]);
  const bool vector = i.operands[1].kind == Operand::Kind::vector;
  if ((vector ? i.operands[1].parts.size() : 1) != count) {
    return b.refuse(i, "the number of registers must fit the shape: correct the list");
  }
  for (size_t n = 0; n < count; ++n)
    detail->in.push_back(b.source(vector ? i.operands[1].parts[n] : i.operands[1], type));
  if (b.failed()) return b.fail(i);
  b.emit(store_op, std::move(detail));
  return {};
}

// st.bulk stores zeros.
struct ZeroDetail : Detail {  // in: address, size
  AddressOperand to;
};

Step zero_op(Context& context, const Op& op) {
  const auto& detail = op.as<ZeroDetail>();
  TANDEM_EACH_LANE(lane, context.mask) {
    const uint64_t bytes = context.row<uint64_t>(detail.in[1])[lane];
    SharedPlace to;
    if (!resolve_shared(context, op, value_of(context, detail, detail.to, lane), false, static_cast<uint32_t>(bytes),
                        &to))
      return Step::end;
    const uint64_t address = to.offset;
    LaneAccess access;
    access.memory = Memory::shared;
    access.writes = true;
    access.bytes = static_cast<uint32_t>(bytes);
    uint64_t addresses[kLanes] = {};
    addresses[lane] = address;
    access.address = addresses;
    Actor actor = context.actor(op);
    actor.lanes = 1u << lane;
    if (context.grid.observer != nullptr && context.grid.observer->access(actor, access) != 0) continue;
    std::memset(to.block->shared.data() + to.offset, 0, bytes);
  }
  ++context.cluster.events;
  return Step::next;
}

Status st_bulk(Builder& b, const Instruction& i) {
  Modifiers words(i);
  for (const char* word : {"bulk", "weak", "shared::cta"}) words.take(word);
  TANDEM_TRY(b.unknown(i, words));
  if (i.operands.size() != 3) return b.refuse(i, "must have the operands that PTX defines: correct the operands");
  auto detail = std::make_unique<ZeroDetail>();
  detail->to = add_address(b, detail.get(), i.operands[0]);
  detail->in.push_back(b.source(i.operands[1], Type::b64));
  if (b.failed()) return b.fail(i);
  b.emit(zero_op, std::move(detail));
  return {};
}

}  // namespace

Status decode_bulk_copy(Builder& b, const Instruction& i) {
  Modifiers words(i);
  auto detail = std::make_unique<BulkDetail>();
  detail->direction = direction_of(i);
  detail->reduces = words.take("reduce");
  for (const char* word : {"async", "bulk", "global", "shared::cta"}) words.take(word);
  words.take("shared::cta");
  detail->cluster = words.take("shared::cluster");
  words.take_of({"mbarrier::complete_tx::bytes", "bulk_group"});
  const bool multicasts = words.take("multicast::cluster"), hint = words.take("L2::cache_hint"),
             masked = words.take("cp_mask");
  if (detail->reduces) TANDEM_TRY(take_reduction(b, i, words, detail.get()));
  TANDEM_TRY(b.unknown(i, words));
  const bool store = detail->direction == Direction::store;
  const size_t expected = (store ? 3u : 4u) + (multicasts ? 1u : 0u) + (hint ? 1u : 0u) + (masked ? 1u : 0u);
  if (i.operands.size() != expected)
    return b.refuse(i, "must have the operands that PTX defines: correct the operands");
  const auto add = [&](const Operand& operand, Type type) {
    detail->in.push_back(b.source(operand, type));
    return static_cast<int32_t>(detail->in.size()) - 1;
  };
  detail->to = add_address(b, detail.get(), i.operands[0]);
  detail->from = add_address(b, detail.get(), i.operands[1]);
  detail->size = add(i.operands[2], Type::b32);
  if (!store) detail->barrier = add_address(b, detail.get(), i.operands[3]);
  if (multicasts) detail->multicast = add(i.operands[4], Type::b16);
  if (masked) detail->byte_mask = add(i.operands.back(), Type::b16);
  if (b.failed()) return b.fail(i);
  b.emit(bulk_op, std::move(detail));
  return {};
}

Status decode_st_async(Builder& b, const Instruction& i) {
  return i.has("bulk") ? st_bulk(b, i) : store_async(b, i, false);
}
Status decode_red_async(Builder& b, const Instruction& i) { return store_async(b, i, true); }

}  // namespace tandem::vgpu::machine
