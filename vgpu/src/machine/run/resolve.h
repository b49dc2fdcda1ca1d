// Converts addresses to memory.
#pragma once

#include "vgpu/src/machine/run/state.h"

namespace tandem::vgpu::machine {

// Addresses that the lanes of an op access.
struct Places {
  std::byte* at[kLanes];
  uint64_t address[kLanes];  // the form that observers receive
  int32_t cta[kLanes];
  uint32_t global = 0, shared = 0, local = 0, constant = 0;  // lanes by kind of memory
  uint32_t nothing = 0;                                      // lanes without an access: they read 0
  bool remote = false;                                       // some lane is in another block's shared memory
  const StoredValues* stored = nullptr;                      // for observers; null: not a weak store
};

// Properties of an access for checks and observers.
struct AccessForm {
  ptx::Space space = ptx::Space::generic;
  bool cluster = false;  // shared::cluster: the address has the rank of a block
  bool reads = false, writes = false, atomic = false;
  Order order = Order::weak;
  Scope scope = Scope::gpu;
  uint32_t bytes = 0;  // bytes of a lane
  uint32_t alignment = 1;
};

// [register + offset]: PTX ISA, "Addresses as Operands".
struct RegisterAddress {
  int32_t row = 0;    // the register
  bool wide = false;  // 8 bytes; else 4
  int64_t offset = 0;
};

// Resolves, checks and announces. False: the run is over.
bool resolve(Context& context, const Op& op, const AccessForm& form, RegisterAddress address, Places* places);

// The block and offset of a shared address, with or without window. own: rank 0 means the block itself.
struct SharedPlace {
  Block* block = nullptr;
  uint32_t offset = 0;
};
// Returns false if the memory does not exist, which is reported as fatal.
bool resolve_shared(Context& context, const Op& op, uint64_t address, bool cluster, uint32_t bytes, SharedPlace* place);

// Resolves a generic, global or parameter address of read-only bytes, such as tensor maps. Null: reported as fatal.
const std::byte* resolve_constant(Context& context, const Op& op, uint64_t address, uint32_t bytes);

}  // namespace tandem::vgpu::machine
