#include "sass/src/cost_model.h"

#include <algorithm>
#include <charconv>
#include <limits>
#include <set>

#include "base/text.h"
#include "sass/src/graph.h"
#include "sass/src/likely_path.h"

namespace tandem::machine_code {
namespace {

constexpr double kTile = 128 * 128;
constexpr int kLanes = 32, kWarpsOfGroup = 4;
constexpr double kDepth = 32;  // bytes of a row that one product sums up
constexpr Role kRoles[] = {Role::load,       Role::mma,     Role::softmax,   Role::computing,
                           Role::correction, Role::staging, Role::reduction, Role::epilogue};

int hex(std::string_view text) {
  int value = 0;
  if (text.starts_with("0x")) std::from_chars(text.data() + 2, text.data() + text.size(), value, 16);
  return value;
}

// tcgen05.alloc takes the number of columns, in units of 32, from a register. An instruction shortly before sets that
// register.
int columns_allocated_at(const std::vector<Instruction>& code, size_t at) {
  constexpr int unit = 32;
  const std::string from = code[at].last();
  for (size_t i = at; i-- > 0;) {
    if (code[i].base() == "UMOV" && code[i].first() == from) return unit * hex(code[i].last());
  }
  return 0;
}

class CostCounter {
 public:
  CostCounter(const Kernel& kernel, const Rates& rates, bool whole, CostModel* cost_model)
      : kernel_(kernel),
        code_(kernel.code),
        graph_(graph_of(kernel.code)),
        rates_(rates),
        whole_(whole),
        cost_model_(*cost_model) {}

  void run() {
    look_at_all();
    find_loops();
    find_shape();
    for (LoopCost& loop : cost_model_.loops) spread(&loop);
    cost_model_.plain = tile(false);
    cost_model_.masked = tile(true);
  }

 private:
  void look_at_all() {
    std::set<std::string> unknown;
    for (size_t i = 0; i < code_.size(); ++i) {
      const std::string_view base = code_[i].base();
      cost_model_.spills += base == "LDL" || base == "STL";
      cost_model_.pair |= is_product(code_[i]) && by_a_pair(code_[i]);
      if (!known(code_[i])) unknown.emplace(base);
      if (base == "UTCATOMSWS" && code_[i].has("FIND_AND_SET"))
        cost_model_.tensor_columns = std::max(cost_model_.tensor_columns, columns_allocated_at(code_, i));
    }
    cost_model_.unknown.assign(unknown.begin(), unknown.end());
  }

  struct FoundLoop {
    const Loop* loop;
    Role role;
    bool whole;     // accesses a semaphore, or multiplies scores and values
    int depth = 0;  // synchronised loops of the role around it
  };

  // A role's loop over steps does the role's work and waits for other roles. Loops that do not wait are parts of that
  // loop which the compiler did not unroll.
  std::vector<FoundLoop> synchronised_loops() const {
    std::vector<FoundLoop> found;
    for (const Loop& loop : graph_.loops) {
      const Work work = look_at(whole_loop(graph_, loop));
      if (!work.role() || !work.synchronised) continue;
      const bool adds = work.role() == Role::reduction && work.semaphores > 0;
      const bool multiplies = work.role() == Role::mma && work.of_scores > 0 && work.of_scores < work.products;
      found.push_back({&loop, *work.role(), adds || multiplies});
    }
    for (FoundLoop& inner : found) {
      inner.depth = static_cast<int>(std::ranges::count_if(
          found, [&](const FoundLoop& o) { return o.role == inner.role && o.loop->contains(*inner.loop); }));
    }
    return found;
  }

  // Returns the loops over steps: the innermost of nested loops, or the innermost that is whole. In a backward, the
  // loads of a step may be in loops within the loop at the depth of the products' step.
  std::vector<const Loop*> step_loops(const std::vector<FoundLoop>& found) const {
    int deepest = std::numeric_limits<int>::max();
    for (const FoundLoop& l : found) {
      const auto within = [&](const FoundLoop& o) { return o.role == l.role && o.whole && l.loop->contains(*o.loop); };
      if (cost_model_.backward && l.role == Role::mma && l.whole && std::ranges::none_of(found, within))
        deepest = std::min(deepest, l.depth);
    }
    std::vector<const Loop*> steps;
    for (const FoundLoop& l : found) {
      const bool too_deep = l.role == Role::load && l.depth > deepest;
      const auto replaces = [&](const FoundLoop& o) {
        return o.role == l.role && l.loop->contains(*o.loop) && o.whole == l.whole &&
               !(l.role == Role::load && o.depth > deepest);
      };
      const auto is_whole_around = [&](const FoundLoop& o) {
        return o.role == l.role && o.loop->contains(*l.loop) && o.whole;
      };
      if (too_deep || std::ranges::any_of(found, replaces)) continue;
      if (l.whole || std::ranges::none_of(found, is_whole_around)) steps.push_back(l.loop);
    }
    return steps;
  }

  void find_loops() {
    const std::vector<FoundLoop> found = synchronised_loops();
    // A forward adds no numbers in global memory. Exponentials cannot decide, because softcap needs as many as the
    // scores.
    cost_model_.backward =
        cost_model_.shape.backward || std::ranges::find(found, Role::reduction, &FoundLoop::role) != found.end();
    const std::vector<const Loop*> steps = step_loops(found);
    for (const Loop* loop : steps) add(*loop);
    for (const FoundLoop& outer : found) {
      const bool around = std::ranges::find(steps, outer.loop) == steps.end();
      if (around && (outer.role == Role::softmax || outer.role == Role::computing)) add_once(*outer.loop, steps);
    }
    std::ranges::stable_sort(cost_model_.loops, {}, &LoopCost::address);
  }

  // Code around the loops over steps may hold a step too: the first step, which does not rescale, or a masked step.
  void add_once(const Loop& around, const std::vector<const Loop*>& steps) {
    const auto outside = [&](const std::vector<int32_t>& path) {
      std::vector<int32_t> rest;
      for (const int32_t i : path) {
        if (std::ranges::none_of(steps, [&](const Loop* loop) { return holds(*loop, i); })) rest.push_back(i);
      }
      return rest;
    };
    const std::vector<int32_t> all = outside(whole_loop(graph_, around));
    add(around, all, whole_ ? all : outside(likely_path(code_, graph_, around, true)));
    cost_model_.loops.back().once = true;
  }

  Work look_at(const std::vector<int32_t>& path) const {
    Work work = work_of(code_, path);
    work.of_gradients = cost_model_.backward;
    return work;
  }

  bool holds(const Loop& loop, int32_t instruction) const {
    return std::ranges::any_of(loop.blocks, [&](int32_t block) {
      const Block& b = graph_.blocks[static_cast<size_t>(block)];
      return instruction >= b.begin && instruction < b.end;
    });
  }

  void add(const Loop& loop) {
    const std::vector<int32_t> all = whole_loop(graph_, loop);
    const std::vector<int32_t> plain = whole_ ? all : likely_path(code_, graph_, loop, false);
    const std::vector<int32_t> masked = whole_ ? all : likely_path(code_, graph_, loop, true);
    add(loop, all, plain);
    if (masked == plain) return;
    add(loop, all, masked);
    for (auto way = cost_model_.loops.end() - 2; way != cost_model_.loops.end(); ++way) way->choice = true;
  }

  void add(const Loop& loop, const std::vector<int32_t>& all, const std::vector<int32_t>& path) {
    LoopCost cost;
    const Work rare = look_at(all);
    cost.role = rare.role().value_or(Role::softmax);
    cost.address = code_[static_cast<size_t>(graph_.blocks[static_cast<size_t>(loop.head)].begin)].address;
    cost.registers = registers_at(loop.head);
    const std::vector<int32_t> executed = repeated(path, loop, cost.role);
    cost.instructions = static_cast<int>(executed.size());
    cost.left_out = static_cast<int>(all.size() - path.size());
    cost.work = look_at(executed);
    cost.masked = cost.work.scores() > 0 && 2 * selects_in(code_, executed) >= cost.work.scores();
    for (const int32_t i : executed) weigh(code_[static_cast<size_t>(i)], &cost);
    if (cost.role == Role::correction && rare.votes > 0)
      rescaled_ = std::max(rescaled_, rare.columns_read / rare.votes);
    cost_model_.loops.push_back(std::move(cost));
  }

  // Repeats inner loops over parts of a step's scores until all scores are covered, if the step's size is known.
  std::vector<int32_t> repeated(const std::vector<int32_t>& path, const Loop& loop, Role role) const {
    const int scores = role == Role::softmax ? cost_model_.shape.keys : cost_model_.shape.keys / 2;
    std::vector<std::pair<const Loop*, int>> parts;
    for (const Loop& part : graph_.loops) {
      const Work work = look_at(whole_loop(graph_, part));
      const int columns = std::max(work.scores(), work.columns_read);
      if (loop.contains(part) && !work.synchronised && columns > 0) parts.emplace_back(&part, scores / columns);
    }
    std::vector<int32_t> all;
    for (const int32_t i : path) {
      int times = 1;
      for (const auto& [part, turns] : parts) times = holds(*part, i) ? std::max(times, turns) : times;
      all.insert(all.end(), static_cast<size_t>(times), i);
    }
    return all;
  }

  // Registers of a thread in the role: the value of the last setmaxnreg before its loop.
  int registers_at(int32_t block) const {
    for (;;) {
      const Block& b = graph_.blocks[static_cast<size_t>(block)];
      for (int32_t i = b.end; i-- > b.begin;) {
        const Instruction& instruction = code_[static_cast<size_t>(i)];
        if (instruction.base() == "USETMAXREG") return hex(instruction.last());
      }
      const int32_t above = graph_.dominators[static_cast<size_t>(block)];
      if (above == block) return kernel_.registers;
      block = above;
    }
  }

  void weigh(const Instruction& i, LoopCost* cost) {
    const Unit unit = unit_of(i);
    ++cost->units[static_cast<size_t>(unit)];
    ++cost->opcodes[i.opcode];
    switch (unit) {
      case Unit::mma: multiply(i, cost); break;
      case Unit::exponential: cost->exponential_lanes += lanes_of(i); break;
      case Unit::fma: cost->fma_lanes += lanes_of(i); break;
      case Unit::alu:
      case Unit::conversion: cost->alu_lanes += lanes_of(i); break;
      case Unit::tensor_memory: cost->tensor_bytes += bytes_of(i); break;
      case Unit::shared_memory: cost->shared_bytes += bytes_of(i); break;
      default: break;
    }
  }

  // One product of a warpgroup has 64 rows.
  void multiply(const Instruction& product, LoopCost* cost) {
    element_depth_ = depth_of(product);
    const double columns = columns_of(product);
    if (columns <= 0) return;
    cost->mma_clocks += columns / rates_.mma_columns / kWarpsOfGroup;
    cost->shared_bytes += kDepth * (columns + (left_in_shared_memory(product) ? 64 : 0)) / kWarpsOfGroup;
  }

  static bool computes(const LoopCost& loop) { return loop.role == Role::computing || loop.role == Role::softmax; }

  void find_shape() {
    Shape& shape = cost_model_.shape;
    bool separate = false;  // products in tensor memory, by another role
    int scores = 0;
    for (const LoopCost& loop : cost_model_.loops) {
      if (!computes(loop) || loop.once) continue;
      scores = std::max(scores, loop.work.scores());
      cost_model_.backward |= loop.work.backward();
      separate |= loop.role == Role::softmax;
    }
    // A thread has one row of the tile in tensor memory, or an eighth of 16 rows.
    scores_ = shape.keys == 0 ? scores : separate ? shape.keys : shape.keys / 2;
    const int warps = separate ? 2 * kWarpsOfGroup : std::max(kernel_.threads / kLanes - kWarpsOfGroup, kWarpsOfGroup);
    block_ =
        shape.keys > 0 && shape.rows > 0 ? double{1} * shape.rows * shape.keys : double{1} * warps * kLanes * scores_;
    if (cost_model_.backward) return;
    if (shape.keys == 0) shape.keys = separate ? scores_ : 2 * scores_;
    if (shape.rows == 0 && shape.keys > 0) shape.rows = static_cast<int>(block_) / shape.keys;
    for (const LoopCost& loop : cost_model_.loops) {
      const Work& w = loop.work;
      if (w.sums == 0 || loop.once) continue;
      if (shape.head_dim == 0) shape.head_dim = w.of_scores / w.sums * w.depth;
      if (shape.head_dim_v == 0) shape.head_dim_v = std::max(w.value_columns, rescaled_);
    }
    if (shape.head_dim_v == 0) shape.head_dim_v = shape.head_dim;
  }

  // The turns that a tile of 128 x 128 scores takes in this loop, and the cost of its products.
  void spread(LoopCost* loop) const {
    const Work& w = loop->work;
    const auto of = [](double scores) { return scores > 0 ? kTile / scores : 0; };
    if (loop->once) return;
    loop->warps = 1;
    switch (loop->role) {
      case Role::computing:
      case Role::softmax: loop->turns = of(kLanes * scores_of_turn(w)); break;
      case Role::mma:
        loop->turns = of(cost_model_.backward ? block_ : 128.0 * cost_model_.shape.keys * sums_of(w));
        if (cost_model_.pair) loop->warps = 0.5;  // one of two blocks issues for both
        break;
      case Role::load: loop->turns = of(block_ * std::max(1, w.waits / cost_model_.shape.load_waits)); break;
      case Role::staging:
        loop->turns = of(block_);
        loop->warps = kWarpsOfGroup;
        break;
      case Role::correction:
        loop->turns = of(w.votes > 0 ? 128.0 * cost_model_.shape.keys * w.votes : block_);
        loop->warps = kWarpsOfGroup;
        break;
      case Role::reduction:  // all columns; one warp, or four that load tensor memory
        loop->turns = of(block_) * (w.columns_read > 0 ? std::max(1, dq_columns() / w.columns_read) : 1);
        loop->warps = w.columns_read > 0 ? kWarpsOfGroup : 1;
        break;
      case Role::epilogue:
      case Role::relay: break;
    }
    if (w.products > 0 && loop->mma_clocks == 0) multiply(loop);
  }

  // A loop may hold several unrolled turns.
  int scores_of_turn(const Work& w) const { return scores_ == 0 ? 0 : std::max(1, w.scores() / scores_) * scores_; }

  int sums_of(const Work& w) const {
    const int products = cost_model_.shape.head_dim / std::max(1, w.depth);
    return std::max(1, products > 0 ? w.of_scores / products : w.sums);
  }

  // Columns of dq in a backward pass: 128 if head_dim is unknown.
  int dq_columns() const { return cost_model_.shape.head_dim > 0 ? cost_model_.shape.head_dim : 128; }

  // Products whose columns the code does not show have `keys` or `head_dim_v` columns. Each block of a pair has half of
  // them in its shared memory.
  void multiply(LoopCost* loop) const {
    if (cost_model_.backward) return multiply_backward(loop);
    const Work& w = loop->work;
    const double keys = cost_model_.shape.keys, values = cost_model_.shape.head_dim_v;
    const double of_scores = w.of_scores, of_values = w.products - w.of_scores, share = cost_model_.pair ? 0.5 : 1;
    loop->mma_clocks = (of_scores * keys + of_values * values) / rates_.mma_columns;
    loop->shared_bytes += kDepth * (of_scores * (128 + share * keys) + of_values * share * values);
  }

  // S, dP and dQ have both operands in shared memory, dV and dK have P and dS in tensor memory. S and dP have 128
  // columns, and dV, dK and dQ have head_dim columns.
  void multiply_backward(LoopCost* loop) const {
    const Work& w = loop->work;
    const double dk = dq_columns(), dv = cost_model_.shape.head_dim_v > 0 ? cost_model_.shape.head_dim_v : dk;
    const double scores = std::min<double>(w.of_scores, (dk + dv) / std::max(1, w.depth)), dq = w.of_scores - scores;
    const double of_keys = w.products - w.of_scores, share = cost_model_.pair ? 0.5 : 1;
    loop->mma_clocks = (scores * 128 + dq * dk + of_keys * (dk + dv) / 2) / rates_.mma_columns;
    loop->shared_bytes +=
        kDepth * (scores * (128 + share * 128) + dq * (128 + share * dk) + of_keys * share * (dk + dv) / 2);
  }

  std::optional<TileCost> tile(bool masked) const {
    if (cost_model_.steady_softmax(masked) == nullptr) return std::nullopt;
    TileCost tile;
    double mma = 0, tensor = 0, shared = copied_bytes(), exponential = 0, fma = 0, alu = 0;
    for (const Role role : kRoles) {
      const LoopCost* loop = cost_model_.steady(role, masked);
      if (loop == nullptr) continue;
      for (size_t u = 0; u < kUnits; ++u) tile.instructions[u] += loop->units[u] * loop->per_tile();
      tile.issued += loop->instructions * loop->per_tile();
      mma += loop->mma_clocks * loop->turns;  // on both SMs of a pair
      shared += loop->shared_bytes * (role == Role::mma ? loop->turns : loop->per_tile());
      tensor += loop->tensor_bytes * loop->per_tile();
      exponential += loop->exponential_lanes * loop->per_tile();
      fma += loop->fma_lanes * loop->per_tile();
      alu += loop->alu_lanes * loop->per_tile();
    }
    const auto set = [&](Unit unit, double clocks) { tile.clocks[static_cast<size_t>(unit)] = clocks; };
    set(Unit::mma, mma);
    set(Unit::exponential, exponential / rates_.exponentials);
    set(Unit::fma, fma / rates_.fma);
    set(Unit::alu, alu / rates_.alu);
    set(Unit::shared_memory, shared / rates_.shared_bytes);
    if (rates_.tensor_bytes > 0) set(Unit::tensor_memory, tensor / rates_.tensor_bytes);
    tile.issue_clocks = tile.issued / rates_.issue;
    tile.binds = binds(tile);
    return tile;
  }

  // Returns the slowest unit, or all units that share the highest clocks.
  static std::string binds(const TileCost& tile) {
    constexpr double as_many = 0.999;
    const double most = std::max(*std::ranges::max_element(tile.clocks), tile.issue_clocks);
    std::string names;
    const auto add = [&](double clocks, std::string_view name) {
      if (clocks >= as_many * most) names += str_cat(names.empty() ? "" : ", ", name);
    };
    for (size_t u = 0; u < kUnits; ++u) add(tile.clocks[u], name_of(static_cast<Unit>(u)));
    add(tile.issue_clocks, "issue");
    return names;
  }

  // Bytes of keys and values in a step. Copies write keys and values to shared memory once for all rows of a block.
  double copied_bytes() const {
    if (cost_model_.backward || block_ <= 0) return 0;
    const Shape& shape = cost_model_.shape;
    const double bytes = 1.0 * shape.keys * (shape.head_dim + shape.head_dim_v) * kDepth / element_depth_;
    return bytes / (cost_model_.pair ? 2 : 1) * kTile / block_;
  }

  const Kernel& kernel_;
  const std::vector<Instruction>& code_;
  const Graph graph_;
  const Rates& rates_;
  const bool whole_;
  CostModel& cost_model_;

  int scores_ = 0;          // per thread and turn
  double block_ = 0;        // scores of a block between two steps of keys
  int rescaled_ = 0;        // columns of tensor memory per vote of a correction
  int element_depth_ = 16;  // elements in 32 bytes
};

}  // namespace

const LoopCost* CostModel::steady(Role role, bool with_mask) const {
  const bool scores = role == Role::softmax || role == Role::computing;
  const auto better = [&](const LoopCost& a, const LoopCost& b) {
    if (!scores) return a.work.loads + a.work.products > b.work.loads + b.work.products;
    // In two passes the pass that computes dS reads more.
    if (backward && a.work.columns_read != b.work.columns_read) return a.work.columns_read > b.work.columns_read;
    if (!with_mask && a.choice != b.choice) return b.choice;
    return a.instructions * a.turns < b.instructions * b.turns;
  };
  const LoopCost* best = nullptr;
  for (const LoopCost& loop : loops) {
    if (loop.role != role || loop.once || (scores && (loop.masked != with_mask || loop.turns <= 0))) continue;
    if (best == nullptr || better(loop, *best)) best = &loop;
  }
  return best;
}

const LoopCost* CostModel::steady_softmax(bool with_mask) const {
  const LoopCost* softmax = steady(Role::softmax, with_mask);
  return softmax != nullptr ? softmax : steady(Role::computing, with_mask);
}

const Kernel& kernel_of(const Cubin& cubin) {
  const auto products = [](const Kernel& kernel) { return std::ranges::count_if(kernel.code, is_product); };
  return *std::ranges::max_element(cubin.kernels, {}, products);
}

Status cost_model(const Cubin& cubin, const Shape& known, bool whole, CostModel* cost_model) {
  const Rates* rates = rates_of(cubin.arch);
  if (rates == nullptr) {
    return Status::unsupported(str_cat("the cubin is code for ", cubin.arch,
                                       ", but rates are known for sm_90, sm_100 and sm_103: compile for one of them"));
  }
  const Kernel& kernel = kernel_of(cubin);
  cost_model->arch = cubin.arch;
  cost_model->kernel = kernel.name;
  cost_model->registers = kernel.registers;
  cost_model->threads = kernel.threads;
  cost_model->stack_bytes = kernel.stack_bytes;
  cost_model->shared_bytes = kernel.shared_bytes;
  cost_model->shape = known;
  for (const Kernel& other : cubin.kernels) {
    if (&other != &kernel)
      cost_model->companions.push_back(
          {other.name, other.registers, static_cast<int>(other.code.size()), other.stack_bytes});
  }
  CostCounter(kernel, *rates, whole, cost_model).run();
  if (cost_model->plain || cost_model->masked) return {};
  return Status::unsupported(
      str_cat("the machine code of ", kernel.name,
              " has no loop with exponentials of scores and is no attention kernel: pass another cubin"));
}

}  // namespace tandem::machine_code
