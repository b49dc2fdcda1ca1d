// Plays events to the checker as the machine would raise them.
#pragma once

#include <algorithm>
#include <array>
#include <memory>
#include <string>
#include <vector>

#include "vgpu/src/check/checker.h"

namespace tandem::vgpu {

// Instructions that events name. Each use of a text is one place in the program.
class FakeProgram : public Program {
 public:
  FakeProgram() {
    module_.files = {"kernel.cu"};
    ptx::Symbol table, smem;
    table.name = "table";
    table.space = smem.space = ptx::Space::shared;
    table.type = smem.type = ptx::Type::b8;
    table.elements = 256;
    table.alignment = 16;
    smem.name = "smem";
    smem.elements = 0;
    smem.alignment = 1024;
    smem.is_extern = true;
    function_.name = "kernel";
    function_.symbols = {table, smem};
  }
  int32_t place(const std::string& text) {
    ptx::Instruction instruction;
    size_t begin = 0;
    for (size_t dot = text.find('.'); begin <= text.size(); dot = text.find('.', begin)) {
      const std::string word = text.substr(begin, dot == std::string::npos ? dot : dot - begin);
      if (begin == 0) {
        instruction.opcode = word;
      } else {
        instruction.modifiers.push_back(word);
      }
      if (dot == std::string::npos) break;
      begin = dot + 1;
    }
    function_.instructions.push_back(instruction);
    const auto index = static_cast<int32_t>(function_.instructions.size()) - 1;
    function_.instructions.back().location = {.ptx_line = index + 1, .file = 0, .line = index + 1};
    return index;
  }

  const ptx::Module& module() const override { return module_; }
  const ptx::Function& function() const override { return function_; }
  const ptx::Instruction& source(int32_t i) const override { return function_.instructions[static_cast<size_t>(i)]; }
  int32_t parameter_bytes() const override { return 0; }
  int32_t parameter_offset(int) const override { return 0; }
  int32_t static_shared_bytes() const override { return 256; }
  int32_t registers_needed() const override { return 32; }

 private:
  ptx::Module module_;
  ptx::Function function_;
};

constexpr uint32_t kAll = ~0u, kOne = 1;
constexpr uint32_t kAt = 0x800;       // in shared memory, after `table`: smem begins here
constexpr uint32_t kBar = 0x6000;     // address of the tests' mbarriers
constexpr uint32_t kWindow = 0x8000;  // bytes of a shared window

// Plays clusters to a checker, in order or several at once.
class Play {
 public:
  struct Shape {
    int32_t blocks = 1, cluster = 1, threads = 128;
  };
  Play() : Play(Shape()) {}
  explicit Play(Shape shape, std::vector<Buffer> buffers = {}, size_t most = 20, bool letter = true) : shape_(shape) {
    launch_.program = &program_;
    launch_.grid.x = static_cast<uint32_t>(shape.blocks);
    launch_.cluster.x = static_cast<uint32_t>(shape.cluster);
    launch_.block.x = static_cast<uint32_t>(shape.threads);
    checker = Checker::create(launch_, model_, buffers, {.max_findings = most, .letter = letter});
    for (int32_t b = 0; b < shape.blocks; ++b) checker->block_begins(b, b / shape.cluster, shape.threads, kWindow);
  }

  Actor at(int32_t cta, int32_t warp, uint32_t lanes, const std::string& text) {
    return {cta, warp, lanes, program_.place(text)};
  }
  // An actor that executes the same place again.
  Actor at(int32_t warp, uint32_t lanes, int32_t place) { return {0, warp, lanes, place}; }
  // An actor of block 0.
  Actor at(int32_t warp, uint32_t lanes, const std::string& text) { return at(0, warp, lanes, text); }

  // Lane i accesses bytes at address + i * stride.
  uint32_t touch(const Actor& actor, LaneAccess access, uint64_t address, uint64_t stride, int32_t cta = -1) {
    std::array<uint64_t, 32> addresses{};
    std::array<int32_t, 32> ctas{};
    for (size_t i = 0; i < 32; ++i) addresses[i] = address + i * stride;
    ctas.fill(cta < 0 ? actor.cta : cta);
    access.address = addresses.data();
    access.cta = access.memory == Memory::shared && cta >= 0 ? ctas.data() : nullptr;
    return checker->access(actor, access);
  }
  uint32_t store(const Actor& actor, uint64_t address, uint32_t bytes = 4, uint64_t stride = 4,
                 Memory memory = Memory::shared) {
    return touch(actor, {.memory = memory, .writes = true, .bytes = bytes}, address, stride);
  }
  uint32_t load(const Actor& actor, uint64_t address, uint32_t bytes = 4, uint64_t stride = 4,
                Memory memory = Memory::shared) {
    return touch(actor, {.memory = memory, .reads = true, .bytes = bytes}, address, stride);
  }
  uint32_t atomic(const Actor& actor, uint64_t address, Order order, Scope scope, bool reads, bool writes,
                  Memory memory = Memory::global) {
    return touch(actor,
                 {.memory = memory,
                  .reads = reads,
                  .writes = writes,
                  .atomic = true,
                  .order = order,
                  .scope = scope,
                  .bytes = 4},
                 address, 0);
  }

  void barrier(std::vector<int32_t> warps, uint32_t id = 0, int32_t cta = 0) {
    const int32_t place = program_.place("bar.sync");
    for (const int32_t w : warps) checker->named_arrives({cta, w, kAll, place}, id);
    checker->named_completes(cta, id);
    for (const int32_t w : warps) checker->named_passes({cta, w, kAll, place}, id);
  }
  void cluster_barrier() {
    const int32_t place = program_.place("barrier.cluster.arrive.aligned"),
                  wait = program_.place("barrier.cluster.wait.aligned");
    for (int32_t b = 0; b < shape_.cluster; ++b)
      for (int32_t w = 0; w < shape_.threads / 32; ++w) checker->cluster_arrives({b, w, kAll, place}, Order::release);
    for (int32_t b = 0; b < shape_.cluster; ++b)
      for (int32_t w = 0; w < shape_.threads / 32; ++w) checker->cluster_passes({b, w, kAll, wait});
  }

  // An mbarrier that all warps of the block may use.
  BarrierId mbarrier(uint32_t address = kBar, int32_t cta = 0) {
    const BarrierId id{cta, address};
    checker->mbarrier_inits(at(cta, 0, kOne, "mbarrier.init"), id, 1);
    checker->fence(at(cta, 0, kOne, "fence.mbarrier_init.release.cluster"), Order::release, Scope::cluster);
    std::vector<int32_t> warps;
    for (int32_t w = 0; w < shape_.threads / 32; ++w) warps.push_back(w);
    barrier(warps, 0, cta);
    return id;
  }
  void arrive(const Actor& actor, BarrierId id, uint32_t bytes = 0) {
    checker->mbarrier_arrives(actor, id, 1, bytes, Order::release, Scope::cta);
  }
  void wait(const Actor& actor, BarrierId id, uint64_t phase) {
    checker->mbarrier_passes(actor, id, phase, Order::acquire, Scope::cta);
  }

  AsyncId issue(const Actor& actor, AsyncKind kind, std::vector<Span> reads, std::vector<Span> writes) {
    const AsyncId id = next_++;
    issued = checker->async_issues(actor, kind, id, reads, writes);
    return id;
  }
  // A wgmma of the four warps from this one on.
  AsyncId multiply(int32_t first, std::vector<Span> reads) {
    const int32_t place = program_.place("wgmma.mma_async.sync.aligned");
    const AsyncId id = next_++;
    for (int32_t w = first; w < first + 4; ++w)
      issued = checker->async_issues({0, w, kAll, place}, AsyncKind::wgmma, id,
                                     w == first + 3 ? reads : std::vector<Span>(), {});
    return id;
  }
  static Span shared(uint64_t address, uint32_t bytes, int32_t cta = 0) {
    return {Memory::shared, cta, address, bytes, 1, -1};
  }
  static Span global(const void* address, uint32_t bytes) {
    return {Memory::global, 0, reinterpret_cast<uint64_t>(address), bytes, 1, -1};
  }
  static Span tensor(uint32_t lane, uint32_t column, uint32_t columns, uint32_t rows, int32_t cta = 0) {
    return {Memory::tensor, cta, uint64_t{lane} << 16 | column, 4 * columns, rows, -1};
  }
  // A TMA load that completes a phase of the barrier alone.
  void load_box(const Actor& actor, BarrierId id, uint64_t phase, uint64_t address, uint32_t bytes) {
    const AsyncId op = issue(actor, AsyncKind::bulk_load, {}, {shared(address, bytes)});
    checker->async_completes(op);
    checker->async_signals(op, id, bytes);
    checker->mbarrier_completes(id, phase);
  }

  void end() {
    const int32_t place = program_.place("ret");
    for (int32_t b = 0; b < shape_.blocks; ++b) {
      for (int32_t w = 0; w < shape_.threads / 32; ++w) checker->exits({b, w, kAll, place});
      checker->block_ends(b);
    }
  }

  // Returns "data-race missing-wait", sorted.
  std::string rules() const {
    std::vector<std::string> names;
    for (const Finding& f : checker->findings()) names.emplace_back(name_of(f.rule));
    std::sort(names.begin(), names.end());
    std::string all;
    for (const std::string& name : names) all += (all.empty() ? "" : " ") + name;
    return all;
  }
  std::string text() const {
    std::string all;
    for (const Finding& f : checker->findings()) all += report(program_, f);
    return all;
  }

  std::unique_ptr<Checker> checker;
  bool issued = true;

 private:
  const Shape shape_;
  FakeProgram program_;
  const Model& model_ = *find_model("h200");
  LaunchDescription launch_;
  AsyncId next_ = 1;
};

}  // namespace tandem::vgpu
