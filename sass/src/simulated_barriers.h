// The barriers of the timing model: mbarriers with their phases, and named barriers.
#pragma once

#include <limits>
#include <map>
#include <optional>
#include <vector>

#include "sass/src/clocks.h"

namespace tandem::machine_code {

constexpr double kNever = std::numeric_limits<double>::infinity();
constexpr int kScoreboards = 6;
constexpr uint32_t kBlockBits = 24;  // shared addresses of a cluster: the CTA is above these bits

// The time of an event, and the event.
struct Release {
  double time = 0;
  Cause cause;
};

// A group of bulk copies or additions to global memory.
struct BulkGroup {
  double begin = 0, end = 0;
};

struct SimulatedWarp {
  size_t next = 0;  // event
  double late = 0;  // clocks lost in the second turn
  Release ready;
  Release scoreboards[kScoreboards];
  double issued_last = -1;
  std::vector<int> open;       // products of the open group
  std::vector<int> committed;  // last product of each committed group
  int last_product = -1;
  int awaited = -1;  // a product that other instructions may still delay
  Cause awaits;
  std::optional<BulkGroup> bulk_open;
  std::vector<BulkGroup> bulk_groups;            // committed
  size_t bulk_complete = 0, bulk_published = 0;  // groups
  bool wrote = false;                            // to global memory since its last fence at GPU scope
  struct Tested {
    int phases = 0;  // phases that the warp has waited for
    uint32_t parity = Event::kUnknown;
  };
  std::map<uint32_t, Tested> tested;  // per barrier
};

bool is_copy(const Instruction& instruction);           // a copy into shared memory with an mbarrier
bool is_copy_to_block(const Instruction& instruction);  // to the shared memory of another block
bool arrives(const Instruction& instruction);
bool arrives_after_loads(const Instruction& instruction);  // cp.async.mbarrier.arrive

class Barriers {
 public:
  // All arguments must outlive this object.
  Barriers(const std::vector<Instruction>& code, const Latencies& latencies, Simulation& run,
           std::vector<SimulatedWarp>& warps);

  void arrive(const Event& event, size_t warp, double time, const Cause& cause);
  void wait(size_t warp, const Event& event, double time);
  void arrive_named(size_t warp, const Event& event, double time);
  std::optional<double> bytes_of_copy(const Event& event) const;  // empty: unknown barrier

  // This function runs if all warps wait. Continues the warp with the least progress as if its barrier were complete.
  // Returns false if that warp is near its end, because it may wait for a warp that has ended.
  bool assume_arrival(double time);

 private:
  struct Waiter {
    size_t warp = 0;
    size_t event = 0;
    int scoreboard = -1;  // -1: the warp itself waits
    int phases = 0;       // phases that must be complete
    double issue = 0;
  };
  // Arrivals of one warp at a barrier, or of its copies.
  struct Stream {
    int arrived = 0, total = 0;
    double share = 1;  // arrivals per phase
  };
  struct Mbarrier {
    std::map<size_t, Stream> streams;  // key: 2 x warp, plus 1 for its copies
    std::vector<Release> phases;       // complete phases
    int assumed = 0;                   // assumed phases
    std::vector<Waiter> waiting;
    double bytes = 0;    // per copy
    int max_phases = 0;  // total phases, if only the prologue arrives
    double latest = 0;   // time of the last arrival
  };
  struct NamedBarrier {
    int arrived = 0;
    std::vector<size_t> waiting;
  };
  struct Expected {
    int copies = 0, phases = 0;
    double bytes = 0;
  };

  const Instruction& at(const Event& event) const { return code_[static_cast<size_t>(event.instruction)]; }
  std::vector<uint32_t> addresses(const Event& event) const;
  void find_streams();
  static void set_shares(const Expected& expected, Mbarrier* barrier);
  bool release(const Mbarrier& barrier, const Waiter& waiter);
  double progress(size_t warp) const;

  const std::vector<Instruction>& code_;
  const Latencies& latencies_;
  Simulation& run_;
  std::vector<SimulatedWarp>& warps_;
  std::map<uint32_t, Mbarrier> barriers_;
  std::map<int, NamedBarrier> named_;
};

}  // namespace tandem::machine_code
