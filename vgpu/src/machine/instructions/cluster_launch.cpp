// clusterlaunchcontrol: a running cluster takes over the work of a cluster that has not begun. PTX ISA, chapter of this
// name.
//
// The response has 16 bytes: zeros, or the first block of the cancelled cluster and bit 0 of word 2. x is in word 0, y
// and z in the halves of word 1. The machine code of query_cancel expects this layout, and some kernels read it
// directly.
#include <cstring>

#include "vgpu/src/machine/instructions/bulk.h"
#include "vgpu/src/machine/instructions/tcgen05.h"
#include "vgpu/src/machine/run/execute.h"

namespace tandem::vgpu::machine {
namespace {

using ptx::Instruction;
using ptx::Operand;
using ptx::Type;

struct CancelDetail : Detail {  // in: address of the answer, barrier
  AddressOperand to, barrier;
  bool multicast = false;
};

// Takes the first block of the next cluster that has not begun. Returns false if no such cluster exists.
bool take_cluster(Grid& grid, uint32_t answer[4]) {
  const int32_t index = grid.take_cluster();
  if (index < 0) return false;
  const auto n = static_cast<uint32_t>(index), across = grid.grid.x / grid.cluster.x,
             down = grid.grid.y / grid.cluster.y;
  answer[0] = n % across * grid.cluster.x;
  answer[1] = n / across % down * grid.cluster.y | n / (across * down) * grid.cluster.z << 16;
  answer[2] = 1;
  return true;
}

Step cancel_op(Context& context, const Op& op) {
  const auto& detail = op.as<CancelDetail>();
  TANDEM_EACH_LANE(lane, context.mask) {
    SharedPlace to, barrier;
    if (!resolve_shared(context, op, value_of(context, detail, detail.to, lane), false, 16, &to) ||
        !resolve_shared(context, op, value_of(context, detail, detail.barrier, lane), false, 8, &barrier))
      return Step::end;
    if (to.offset % 16 != 0 &&
        !context.finds(Rule::misaligned, op, "",
                       "the address of the 16-byte answer must be a multiple of 16: align the address", true))
      return Step::end;
    std::array<uint32_t, 4> answer = {};
    take_cluster(context.grid, answer.data());
    std::vector<Block*> blocks;
    if (detail.multicast) {
      for (Block& block : context.cluster.blocks) blocks.push_back(&block);
    } else {
      blocks.push_back(&context.block);
    }
    Copy copy;
    copy.kind = AsyncKind::cluster_launch;
    for (Block* block : blocks) {
      copy.writes.push_back({Memory::shared, block->cta, to.offset, 16, 1});
      copy.signals.push_back({block, barrier.offset, 16});
      copy.blocks |= 1u << block->rank;
    }
    copy.move = [answer, blocks, offset = to.offset] {
      for (Block* block : blocks) std::memcpy(block->shared.data() + offset, answer.data(), 16);
    };
    issue_copy(context, op, lane, std::move(copy));
  }
  return Step::next;
}

Status try_cancel(Builder& b, const Instruction& i, Modifiers& words) {
  auto detail = std::make_unique<CancelDetail>();
  for (const char* word : {"async", "shared::cta", "mbarrier::complete_tx::bytes", "b128"}) words.take(word);
  detail->multicast = words.take("multicast::cluster::all");
  TANDEM_TRY(b.unknown(i, words));
  if (i.operands.size() != 2) return b.refuse(i, "must have the operands that PTX defines: correct the operands");
  detail->to = add_address(b, detail.get(), i.operands[0]);
  detail->barrier = add_address(b, detail.get(), i.operands[1]);
  if (b.failed()) return b.fail(i);
  b.emit(cancel_op, std::move(detail));
  return {};
}

// query_cancel reads a response in a 128-bit register.
Status query_cancel(Builder& b, const Instruction& i, Modifiers& words) {
  const bool canceled = words.take("is_canceled");
  const std::string part =
      words.take_of({"get_first_ctaid", "get_first_ctaid::x", "get_first_ctaid::y", "get_first_ctaid::z"});
  words.take("v4");
  for (const char* word : {"pred", "b32", "b128"}) words.take(word);
  TANDEM_TRY(b.unknown(i, words));
  const int32_t answer = b.source(i.operands[1], Type::b128);
  if (b.failed()) return b.fail(i);
  const auto word = [&](int n) {
    const int32_t half = b.new_register(8), d = b.new_register(4);
    b.emit_lanes(str_cat("part.64.128.", n / 2), half, {answer});
    b.emit_lanes(str_cat("part.32.64.", n % 2), d, {half});
    return d;
  };
  if (canceled) {
    const int32_t d = b.destination(i.operands[0], Type::pred);
    if (b.failed()) return b.fail(i);
    const int32_t bit = b.new_register(4);
    b.emit_lanes("and.b32", bit, {word(2), b.constant(4, 1)});
    b.emit_lanes("setp.ne.u32", d, {bit, b.constant(4, 0)});
    return {};
  }
  const auto coordinate = [&](int n) {
    if (n == 0) return word(0);
    const int32_t d = b.new_register(4);
    if (n == 1)
      b.emit_lanes("and.b32", d, {word(1), b.constant(4, 0xffff)});
    else
      b.emit_lanes("shr.u32", d, {word(1), b.constant(4, 16)});
    return d;
  };
  if (part.empty()) return b.refuse(i, "must have a form that the virtual GPU executes: use another form");
  if (part != "get_first_ctaid") {
    const int32_t d = b.destination(i.operands[0], Type::b32);
    if (b.failed()) return b.fail(i);
    b.copy(d, coordinate(part.back() - 'x'));
    return {};
  }
  const std::vector<Operand>& parts = i.operands[0].parts;
  for (size_t n = 0; n < parts.size(); ++n) {
    if (parts[n].kind == Operand::Kind::sink) continue;
    const int32_t d = b.destination(parts[n], Type::b32);
    if (b.failed()) return b.fail(i);
    b.copy(d, n < 3 ? coordinate(static_cast<int>(n)) : b.constant(4, 0));
  }
  return {};
}

}  // namespace

Status decode_cluster_launch(Builder& b, const Instruction& i) {
  if (!b.model().tcgen05)
    return b.refuse(i, b.model().name + " has no clusterlaunchcontrol: run the kernel on vgpu:b200");
  Modifiers words(i);
  if (words.take("try_cancel")) return try_cancel(b, i, words);
  if (words.take("query_cancel") && i.operands.size() == 2) return query_cancel(b, i, words);
  return b.refuse(i, "must have a form that the virtual GPU executes: use another form");
}

}  // namespace tandem::vgpu::machine
