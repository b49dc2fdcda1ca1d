// One access to shadow memory: the earlier accesses that happened before it, and its conflicts with the rest.
#pragma once

#include <array>
#include <vector>

#include "vgpu/src/check/cluster.h"

namespace tandem::vgpu::check {

// The order that relaxed operations establish between an access and a later access.
enum class Relaxed : uint8_t {
  nothing,
  by_the_letter,  // hardware orders shared memory of the block; PTX does not
  ordered,        // only requires that the earlier access has happened
};

class Access : public Touch {
 public:
  Access(const Sites& sites, int32_t cluster, int32_t cta) : sites_(sites), cluster_(cluster), cta_(cta) {}

  // Begins another epoch of the same instruction.
  void begin(Epoch x) {
    epoch = x;
    met_initialised = false;
    issuers_count_ = 0;
    last_ = Epoch();
    conflicts.clear();
  }
  // The access follows the program order of these threads. All these threads must know earlier accesses, because four
  // warps issue a wgmma.
  void issued_by(const CheckedWarp& warp, const LaneGroup& share, uint32_t lanes) {
    issuers_[issuers_count_++] = {&warp, &share, lanes};
  }
  void narrow(Epoch lane) override {
    epoch = lane;
    issuers_[0].lanes = lane.lanes(0);
    last_ = Epoch();
  }
  // Starts an asynchronous operation on this memory. The async proxy is ordered after writes of threads, and after
  // their reads of shared memory that it overwrites, only by a proxy fence.
  void asynchronous(AsyncKind kind, Memory memory);
  // The lanes of one instruction may write the same bytes: one lane's value remains.
  void lanes_of(const LaneAccess& access, uint32_t lanes) { instruction_ = &access, instruction_lanes_ = lanes; }

  void trusts_relaxed(Relaxed relaxed) { relaxed_ = relaxed; }

  bool is_async() const { return async_; }
  // Returns true for a load or store of tensor memory by the warp of this operation.
  bool is_by_warp_of(const Site& site) const;

  Verdict judge(Epoch x) override;
  bool is_constant(Epoch x) const override { return x.scope() == kWeak && sites_[x.site()].is_constant; }
  void conflict(Epoch x, Verdict verdict, uint32_t at) override;

  struct Conflict {
    Epoch other;
    Verdict verdict;
    uint64_t address;
  };
  std::vector<Conflict> conflicts;    // one entry per site
  uint64_t page = 0;                  // addresses in the page are relative to this address
  std::vector<uint32_t> tensor_past;  // sites of earlier tcgen05 operations

 private:
  struct Issuer {
    const CheckedWarp* warp;
    const LaneGroup* share;
    uint32_t lanes;
  };
  Verdict decide(Epoch x);
  bool crosses_proxies(Epoch x) const;
  void note_past(uint32_t site);
  bool seen(const Site& site, uint16_t row, uint32_t lanes, int32_t time) const;
  bool proxied(const Site& site, uint32_t lanes, int32_t time) const;
  bool widely(const Site& site, uint32_t lanes, int32_t time) const;
  bool both_atomic(const Site& site, Epoch x) const;
  bool same_store(Epoch x) const;
  bool changes_nothing(const Site& site, Epoch x) const;
  bool same_copy(const Site& site) const;
  bool in_order(const Site& site) const;
  bool same_lanes(const Site& site, Epoch x) const;
  Verdict handed_over(const Site& site, uint16_t row, uint32_t lanes, int32_t time) const;

  const Sites& sites_;
  const int32_t cluster_, cta_;
  std::array<Issuer, 4> issuers_;
  int issuers_count_ = 0;
  bool async_ = false, proxy_ = false;
  Relaxed relaxed_ = Relaxed::nothing;
  AsyncKind kind_ = AsyncKind::bulk_load;
  Memory memory_ = Memory::shared;
  const LaneAccess* instruction_ = nullptr;
  uint32_t instruction_lanes_ = 0;
  Epoch last_;
  Verdict last_verdict_ = Verdict::ordered;
};

// Returns true if the operation accesses memory through the async proxy instead of as threads do.
bool is_proxy(AsyncKind kind);
// Returns true for tcgen05 operations.
bool on_tensor_memory(AsyncKind kind);
// Returns true if threads wait for the operation by groups. At their exit the checker then knows whether they waited.
inline bool waits_by_group(AsyncKind kind) { return kind == AsyncKind::wgmma || kind == AsyncKind::bulk_store; }

}  // namespace tandem::vgpu::check
