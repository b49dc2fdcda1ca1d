// cp.async.bulk.tensor and cp.reduce.async.bulk.tensor. PTX ISA, chapters of these names.
#include "vgpu/src/machine/instructions/bulk.h"
#include "vgpu/src/machine/run/execute.h"
#include "vgpu/src/units/box.h"
#include "vgpu/src/units/tensor_map.h"

namespace tandem::vgpu::machine {
namespace {

using ptx::Instruction;
using ptx::Operand;
using ptx::Type;

struct TensorDetail : Detail {
  Direction direction = Direction::load;
  bool reduces = false;
  units::Reduction reduction = units::Reduction::add;
  units::BoxMode mode = units::BoxMode::tile;
  int32_t rank = 0;
  bool cluster = false;  // the destination's address has a rank
  bool pair = false;     // .cta_group::2: the mbarrier may belong to the peer
  AddressOperand shared, map, barrier;
  int32_t coordinates = 0, coordinate_count = 0;  // in `in`
  int32_t multicast = -1;                         // in `in`
};

Status check_copy(const TensorDetail& detail, const units::BoxCopy& copy) {
  TANDEM_TRY(units::check(copy, detail.rank, detail.direction == Direction::load));
  return detail.reduces ? units::check_reduction(detail.reduction, copy.map.type) : Status();
}

// The blocks that receive a load: the blocks of the mask, or the block of the address.
bool destinations(Context& context, const Op& op, const TensorDetail& detail, uint32_t lane, Block* addressed,
                  std::vector<Block*>* blocks) {
  if (detail.multicast < 0) {
    blocks->push_back(addressed);
    return true;
  }
  const uint32_t mask = context.row(detail.in[static_cast<size_t>(detail.multicast)])[lane] & 0xffff;
  for (size_t rank = 0; rank < 16; ++rank) {
    if ((mask >> rank & 1) == 0) continue;
    if (rank >= context.cluster.blocks.size()) {
      context.finds(Rule::wrong_space, op, "",
                    "the multicast mask names block rank " + std::to_string(rank) +
                        ", which the cluster does not have: clear this bit of the mask",
                    true);
      return false;
    }
    blocks->push_back(&context.cluster.blocks[rank]);
  }
  return true;
}

void add_spans(Memory memory, int32_t cta, const std::vector<units::Range>& ranges, std::vector<Span>* spans) {
  for (const units::Range& r : ranges) spans->push_back({memory, cta, r.address, r.bytes, 1});
}

bool issue_load(Context& context, const Op& op, const TensorDetail& detail, uint32_t lane, const units::BoxCopy& box,
                Block* addressed) {
  SharedPlace barrier;
  if (!resolve_shared(context, op, value_of(context, detail, detail.barrier, lane), detail.cluster, 8, &barrier))
    return false;
  if (!detail.pair && detail.multicast < 0 && barrier.block != addressed &&
      !context.finds(Rule::invalid_barrier, op, "",
                     "the mbarrier must be in the block that receives the data: use that block, or .cta_group::2"))
    return false;
  std::vector<Block*> blocks;
  if (!destinations(context, op, detail, lane, addressed, &blocks)) return false;
  Copy copy;
  copy.kind = AsyncKind::bulk_load;
  const uint32_t bytes = units::transaction_bytes(box);
  std::vector<units::Range> global, shared;
  if (context.grid.observer != nullptr) {
    units::list_ranges(box, true, &global, &shared);
    add_spans(Memory::global, 0, global, &copy.reads);
  }
  for (Block* block : blocks) {
    add_spans(Memory::shared, block->cta, shared, &copy.writes);
    copy.blocks |= 1u << block->rank;
    Block* signalled = block;
    if (detail.multicast < 0)
      signalled = barrier.block;
    else if (detail.pair)
      signalled = &context.cluster.blocks[static_cast<size_t>((block->rank & ~1) | (barrier.block->rank & 1))];
    copy.blocks |= 1u << signalled->rank;
    copy.signals.push_back({signalled, barrier.offset, bytes});
  }
  copy.move = [box, blocks] {
    for (Block* block : blocks) units::load_box(box, block->shared.data());
  };
  issue_copy(context, op, lane, std::move(copy));
  return true;
}

void issue_store(Context& context, const Op& op, const TensorDetail& detail, uint32_t lane, const units::BoxCopy& box,
                 Block* block) {
  Copy copy;
  copy.kind = AsyncKind::bulk_store;
  if (context.grid.observer != nullptr) {
    std::vector<units::Range> global, shared;
    units::list_ranges(box, false, &global, &shared);
    add_spans(Memory::shared, block->cta, shared, &copy.reads);
    add_spans(Memory::global, 0, global, &copy.writes);
  }
  copy.blocks = 1u << block->rank;
  copy.group = open_group(context.warp, lane, true);
  const bool reduces = detail.reduces;
  const units::Reduction reduction = detail.reduction;
  copy.move = [box, block, reduces, reduction] {
    if (reduces)
      units::reduce_box(box, reduction, block->shared.data());
    else
      units::store_box(box, block->shared.data());
  };
  issue_copy(context, op, lane, std::move(copy));
}

bool issue_lane(Context& context, const Op& op, const TensorDetail& detail, uint32_t lane) {
  const std::byte* map = resolve_constant(context, op, value_of(context, detail, detail.map, lane), 128);
  if (map == nullptr) return false;
  units::BoxCopy box;
  Status status = units::decode(map, &box.map);
  if (!status.ok()) {
    context.finds(Rule::invalid_tensor_map, op, "", status.message, true);
    return false;
  }
  box.mode = detail.mode;
  for (int32_t n = 0; n < detail.coordinate_count; ++n)
    box.coordinates[n] = static_cast<int32_t>(
        context.row(detail.in[static_cast<size_t>(detail.coordinates) + static_cast<size_t>(n)])[lane]);
  SharedPlace place;
  if (!resolve_shared(context, op, value_of(context, detail, detail.shared, lane), detail.cluster, 1, &place))
    return false;
  box.shared = place.offset;
  status = check_copy(detail, box);
  if (!status.ok()) {
    context.finds(Rule::invalid_tensor_map, op, "", status.message, true);
    return false;
  }
  if (!resolve_shared(context, op, value_of(context, detail, detail.shared, lane), detail.cluster,
                      units::image_bytes(box), &place))
    return false;
  if (detail.direction == Direction::load) return issue_load(context, op, detail, lane, box, place.block);
  issue_store(context, op, detail, lane, box, place.block);
  return true;
}

Step tensor_op(Context& context, const Op& op) {
  const auto& detail = op.as<TensorDetail>();
  TANDEM_EACH_LANE(lane, context.mask)
  if (!issue_lane(context, op, detail, lane)) return Step::end;
  return context.grid.stopped.load(std::memory_order_relaxed) ? Step::end : Step::next;
}

Status take_reduction(Builder& b, const Instruction& i, Modifiers& words, TensorDetail* detail) {
  const std::string names[] = {"add", "min", "max", "inc", "dec", "and", "or", "xor"};
  for (int n = 0; n < 8; ++n) {
    if (!words.take(names[n])) continue;
    detail->reduction = static_cast<units::Reduction>(n);
    return {};
  }
  return b.refuse(i, "must be an operation that the virtual GPU executes: use another operation");
}

// [map, {x, y}]
Status take_box(Builder& b, const Instruction& i, const Operand& operand, TensorDetail* detail) {
  if (operand.kind != Operand::Kind::address || operand.parts.size() != 2 ||
      operand.parts[1].kind != Operand::Kind::vector)
    return b.refuse(i, "must have an operand [map, {coordinates}]: add the operand");
  detail->map = add_address(b, detail, operand);
  detail->coordinates = static_cast<int32_t>(detail->in.size());
  for (const Operand& c : operand.parts[1].parts) detail->in.push_back(b.source(c, Type::b32));
  detail->coordinate_count = static_cast<int32_t>(operand.parts[1].parts.size());
  const int32_t expected = detail->mode == units::BoxMode::rows4 ? 5 : detail->rank;
  if (detail->coordinate_count != expected)
    return b.refuse(i, "the number of coordinates must be the rank: correct the list");
  return {};
}

}  // namespace

Status decode_tensor_copy(Builder& b, const Instruction& i) {
  Modifiers words(i);
  auto detail = std::make_unique<TensorDetail>();
  detail->direction = direction_of(i);
  detail->reduces = words.take("reduce");
  for (const char* word : {"async", "bulk", "tensor", "global", "shared::cta"}) words.take(word);
  detail->cluster = words.take("shared::cluster");
  const std::string rank = words.take_of({"1d", "2d", "3d", "4d", "5d"});
  if (words.take_of({"tile::gather4", "tile::scatter4"}).empty())
    words.take("tile");
  else
    detail->mode = units::BoxMode::rows4;
  words.take_of({"mbarrier::complete_tx::bytes", "bulk_group"});
  detail->pair = words.take_of({"cta_group::1", "cta_group::2"}) == "cta_group::2";
  const bool multicast = words.take("multicast::cluster");
  const bool hint = words.take("L2::cache_hint");
  if (detail->reduces) TANDEM_TRY(take_reduction(b, i, words, detail.get()));
  TANDEM_TRY(b.unknown(i, words));
  if (rank.empty()) return b.refuse(i, "must name its rank: add .1d to .5d");
  detail->rank = rank[0] - '0';
  const bool load = detail->direction == Direction::load;
  const size_t expected = (load ? 3u : 2u) + (multicast ? 1u : 0u) + (hint ? 1u : 0u);
  if (i.operands.size() != expected)
    return b.refuse(i, "must have the operands that PTX defines: correct the operands");
  TANDEM_TRY(take_box(b, i, i.operands[load ? 1 : 0], detail.get()));
  detail->shared = add_address(b, detail.get(), i.operands[load ? 0 : 1]);
  if (load) detail->barrier = add_address(b, detail.get(), i.operands[2]);
  if (multicast) {
    detail->multicast = static_cast<int32_t>(detail->in.size());
    detail->in.push_back(b.source(i.operands[3], Type::b16));
  }
  if (b.failed()) return b.fail(i);
  b.emit(tensor_op, std::move(detail));
  return {};
}

}  // namespace tandem::vgpu::machine
