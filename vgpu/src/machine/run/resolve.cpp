#include "vgpu/src/machine/run/resolve.h"

#include <cstdio>

#include "base/text.h"

namespace tandem::vgpu::machine {
namespace {

constexpr uint64_t kLowestGlobal = 0x10000;  // hosts map nothing below this address

std::string hex(uint64_t x) {
  char text[24];
  std::snprintf(text, sizeof text, "0x%llx", static_cast<unsigned long long>(x));
  return text;
}

bool outside(Context& context, const Op& op, const char* memory, uint64_t address, uint32_t bytes, uint64_t end) {
  context.finds(
      Rule::out_of_bounds, op, str_cat(memory, " ", hex(address)),
      str_cat(bytes, " bytes at ", hex(address), " are outside of the ", memory, " memory, which ends at ", hex(end)),
      true);
  return false;
}

// Returns the space of a generic address, and converts it to an address in that space.
ptx::Space space_of(uint64_t* address) {
  if (in_window(*address, kSharedWindow)) {
    *address &= ~kWindowMask;
    return ptx::Space::shared;
  }
  if (in_window(*address, kLocalWindow)) {
    *address &= ~kWindowMask;
    return ptx::Space::local;
  }
  return in_window(*address, kParamWindow) ? ptx::Space::param : ptx::Space::global;
}

class Resolver {
 public:
  Resolver(Context& context, const Op& op, const AccessForm& form, Places* places)
      : context_(context), op_(op), form_(form), places_(places) {}

  bool lane(uint32_t lane, uint64_t address) {
    const uint32_t bit = 1u << lane;
    ptx::Space space = form_.space;
    const bool generic = space == ptx::Space::generic;
    if (generic) space = space_of(&address);
    places_->cta[lane] = context_.block.cta;
    places_->address[lane] = address;
    switch (space) {
      case ptx::Space::shared: {
        SharedPlace place;
        if (!resolve_shared(context_, op_, address, generic || form_.cluster, form_.bytes, &place)) return false;
        places_->shared |= bit;
        places_->at[lane] = place.block->shared.data() + place.offset;
        places_->address[lane] = place.offset;
        places_->cta[lane] = place.block->cta;
        places_->remote = places_->remote || place.block != &context_.block;
        return true;
      }
      case ptx::Space::local: {
        const auto size = static_cast<uint64_t>(context_.grid.code->local_bytes);
        if (in_window(address, kLocalWindow)) places_->address[lane] = address &= ~kWindowMask;
        if (address + form_.bytes > size || address > size)
          return outside(context_, op_, "local", address, form_.bytes, size);
        places_->local |= bit;
        places_->at[lane] = context_.warp.local.data() + lane * size + address;
        return true;
      }
      case ptx::Space::param: {
        if (in_window(address, kLocalWindow)) {  // a function's parameter whose address is taken
          AccessForm form = form_;
          form.space = ptx::Space::local;
          return Resolver(context_, op_, form, places_).lane(lane, address);
        }
        const uint64_t at = in_window(address, kParamWindow) ? address & ~kWindowMask : address;
        const uint64_t size = context_.grid.parameters.size();
        if (at > size || at + form_.bytes > size || form_.writes)
          return outside(context_, op_, "parameter", at, form_.bytes, size);
        places_->constant |= bit;
        places_->at[lane] = context_.grid.parameters.data() + at;
        return true;
      }
      case ptx::Space::constant: {
        const ModuleMemory& memory = *context_.grid.code->memory;
        uint64_t at = address - reinterpret_cast<uintptr_t>(memory.bytes.get());
        if (address >> 32 == 0) at = static_cast<uint32_t>(at);  // the low half of an address
        if (at > memory.size || at + form_.bytes > memory.size)
          return outside(context_, op_, "constant", at, form_.bytes, memory.size);
        places_->constant |= bit;
        places_->at[lane] = memory.bytes.get() + at;
        return true;
      }
      default:
        if (address < kLowestGlobal || address >= kSharedWindow) {
          context_.finds(Rule::wrong_space, op_, hex(address),
                         hex(address) + " must be an address of global memory: correct the address", true);
          return false;
        }
        places_->global |= bit;
        places_->at[lane] = reinterpret_cast<std::byte*>(static_cast<uintptr_t>(address));
        return true;
    }
  }

 private:
  Context& context_;
  const Op& op_;
  const AccessForm& form_;
  Places* places_;
};

void announce(Context& context, const Op& op, const AccessForm& form, Places* places) {
  Actor actor = context.actor(op);
  LaneAccess access;
  access.reads = form.reads;
  access.writes = form.writes;
  access.atomic = form.atomic;
  access.order = form.order;
  access.scope = form.scope;
  access.bytes = form.bytes;
  access.address = places->address;
  access.stored = places->stored;
  const auto say = [&](Memory memory, uint32_t lanes) {
    if (lanes == 0) return;
    access.memory = memory;
    access.cta = memory == Memory::shared && places->remote ? places->cta : nullptr;
    actor.lanes = lanes;
    places->nothing |= context.grid.observer->access(actor, access);
  };
  say(Memory::global, places->global);
  say(Memory::shared, places->shared);
  say(Memory::local, places->local);
}

}  // namespace

bool resolve_shared(Context& context, const Op& op, uint64_t address, bool cluster, uint32_t bytes,
                    SharedPlace* place) {
  if (in_window(address, kSharedWindow)) address &= ~kWindowMask;
  const uint64_t rank = address >> kRankShift;
  const auto offset = static_cast<uint32_t>(address & kSharedOffset);
  Block* block = &context.block;
  if (rank != static_cast<uint64_t>(block->rank) && (rank != 0 || cluster)) {
    if (!cluster || rank >= context.cluster.blocks.size()) {
      context.finds(Rule::wrong_space, op, "shared " + hex(address),
                    rank >= context.cluster.blocks.size()
                        ? "the cluster has no block of rank " + std::to_string(rank)
                        : "the address is in the shared memory of block rank " + std::to_string(rank) +
                              ", but the instruction reaches only the memory of its block",
                    true);
      return false;
    }
    block = &context.cluster.blocks[rank];
    if (block->threads_alive == 0) {
      context.finds(Rule::live_at_exit, op, "shared " + hex(address),
                    "block " + std::to_string(block->cta) +
                        " has ended: keep the block running until the last access to its memory");
    }
  }
  if (offset < kReservedShared || uint64_t{offset} + bytes > block->shared.size()) {
    return outside(context, op, "shared", offset, bytes, block->shared.size());
  }
  *place = {block, offset};
  return true;
}

const std::byte* resolve_constant(Context& context, const Op& op, uint64_t address, uint32_t bytes) {
  AccessForm form;
  form.bytes = bytes;
  Places places = {};
  return Resolver(context, op, form, &places).lane(0, address) ? places.at[0] : nullptr;
}

bool resolve(Context& context, const Op& op, const AccessForm& form, RegisterAddress address, Places* places) {
  Resolver resolver(context, op, form, places);
  const auto* narrow_rows = context.row<uint32_t>(address.row);
  const auto* wide_rows = context.row<uint64_t>(address.row);
  uint64_t low_bits = 0;
  TANDEM_EACH_LANE(lane, context.mask) {
    uint64_t a = (address.wide ? wide_rows[lane] : narrow_rows[lane]) + static_cast<uint64_t>(address.offset);
    if (!address.wide) a = static_cast<uint32_t>(a);
    low_bits |= a;
    if (!resolver.lane(lane, a)) return false;
  }
  if ((low_bits & (form.alignment - 1)) != 0) {
    if (!context.finds(Rule::misaligned, op, "",
                       "the address of an access of " + std::to_string(form.alignment) +
                           " bytes must be a multiple of this size: align the address"))
      return false;
  }
  if (context.grid.observer != nullptr) announce(context, op, form, places);
  return true;
}

}  // namespace tandem::vgpu::machine
