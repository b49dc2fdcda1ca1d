// Program::decode: converts a kernel's PTX to ops. Called functions are decoded into the kernel at each call.
#include <algorithm>
#include <set>

#include "vgpu/src/machine/address.h"
#include "vgpu/src/machine/decode/allocate.h"
#include "vgpu/src/machine/decode/builder.h"
#include "vgpu/src/machine/decode/calls.h"
#include "vgpu/src/machine/decode/flow.h"
#include "vgpu/src/machine/decode/unwritten.h"
#include "vgpu/src/ptx/inlining.h"

namespace tandem::vgpu {
namespace machine {
namespace {

using ptx::Function;
using ptx::Instruction;
using ptx::Operand;
using ptx::Space;
using ptx::Symbol;

constexpr size_t kMaxOps = 4'000'000;  // inlined callees included
constexpr int kDeepestCall = 32;

int64_t aligned(int64_t at, int64_t alignment) { return (at + alignment - 1) / alignment * alignment; }

const std::unordered_map<std::string_view, Decoder>& decoders() {
  static const auto all = [] {
    std::unordered_map<std::string_view, Decoder> map;
    for (const auto& families : all_families())
      for (const Family& family : families) map[family.opcode] = family.decode;
    return map;
  }();
  return all;
}

class KernelDecoder {
 public:
  KernelDecoder(Code* code, const Model& model) : code_(code), builder_(code, model) {}

  Status run() {
    const Function& f = *code_->function;
    lay_out_parameters(f);
    place_shared(f);
    Frame frame;
    TANDEM_TRY(body(f, &frame, 0));
    // Threads that reach the last instruction of the kernel end.
    for (Op& op : code_->ops) op.source = std::min(op.source, static_cast<int32_t>(code_->sources.size()) - 1);
    const int32_t always = builder_.always();
    insert_joins(&code_->ops, always);
    find_unwritten(code_, builder_.registers(), always);
    allocate_registers(code_, builder_.registers(), always);
    return {};
  }

 private:
  void lay_out_parameters(const Function& f) {
    int64_t at = 0;
    for (const int32_t p : f.parameters) {
      const Symbol& symbol = f.symbols[static_cast<size_t>(p)];
      at = aligned(at, std::max(symbol.alignment, 1));
      code_->parameter_offsets.push_back(static_cast<int32_t>(at));
      at += symbol.bytes();
    }
    code_->parameter_bytes = static_cast<int32_t>(at);
  }

  void collect(const Operand& operand, std::set<int32_t>* symbols) const {
    if (operand.kind == Operand::Kind::symbol) symbols->insert(operand.symbol);
    for (const Operand& part : operand.parts) collect(part, symbols);
  }

  // Variables of functions may have the same names.
  std::string shared_key(const Function& f, int32_t symbol) const {
    const bool own = static_cast<size_t>(symbol) >= code_->module->variables.size();
    return (own ? f.name + "/" : "") + f.symbols[static_cast<size_t>(symbol)].name;
  }

  // Places the module's shared variables that f or its callees name, then the functions' variables, then dynamic
  // memory.
  void place_shared(const Function& f) {
    std::set<const Function*> seen;
    std::vector<const Function*> left = {&f};
    int64_t at = kReservedShared, dynamic_alignment = 16;
    while (!left.empty()) {
      const Function& g = *left.back();
      left.pop_back();
      if (!seen.insert(&g).second) continue;
      std::set<int32_t> symbols;
      for (const Instruction& i : g.instructions) {
        for (const Operand& operand : i.operands) collect(operand, &symbols);
        if (i.opcode != "call" || i.operands.size() < 2) continue;
        if (const Function* callee = code_->module->find(i.operands[1].text)) left.push_back(callee);
      }
      for (const int32_t s : symbols) {
        const Symbol& symbol = g.symbols[static_cast<size_t>(s)];
        if (symbol.space != Space::shared) continue;
        if (symbol.elements == 0) {
          dynamic_alignment = std::max<int64_t>(dynamic_alignment, symbol.alignment);
        } else if (!shared_.contains(shared_key(g, s))) {
          at = aligned(at, std::max(symbol.alignment, 1));
          shared_[shared_key(g, s)] = static_cast<uint64_t>(at);
          at += symbol.bytes();
        }
      }
    }
    code_->static_shared = static_cast<int32_t>(at - kReservedShared);
    code_->dynamic_shared_at = static_cast<uint32_t>(aligned(at, dynamic_alignment));
  }

  Status place_symbols(Frame* frame) {
    const Function& f = *frame->function;
    frame->places.resize(f.symbols.size());
    for (size_t s = 0; s < f.symbols.size(); ++s) {
      const Symbol& symbol = f.symbols[s];
      OperandPlace& place = frame->places[s];
      if (place.space == Space::local || place.in_register) continue;  // an argument
      place.space = symbol.space;
      switch (symbol.space) {
        case Space::shared:
          if (symbol.elements == 0)
            place.at = code_->dynamic_shared_at;
          else if (const auto found = shared_.find(shared_key(f, static_cast<int32_t>(s))); found != shared_.end())
            place.at = found->second;
          break;
        case Space::global:
        case Space::constant:
          place.at = s < code_->memory->address.size() ? reinterpret_cast<uintptr_t>(code_->memory->address[s]) : 0;
          break;
        case Space::local:
        case Space::param: {  // parameters of calls, not of the entry
          place.space = Space::local;
          place.at = static_cast<uint64_t>(builder_.local_space(symbol.bytes(), std::max(symbol.alignment, 1)));
          break;
        }
        case Space::reg:
          place.in_register = true;
          place.reg = builder_.new_register(width_of(symbol.type));
          break;
        default: break;
      }
    }
    return {};
  }

  Status body(const Function& f, Frame* frame, int depth) {
    if (depth > kDeepestCall)
      return Status::unsupported(f.name + ": calls must be nested at most " + std::to_string(kDeepestCall) +
                                 " deep: remove the recursion");
    frame->function = &f;
    frame->registers = static_cast<int32_t>(builder_.registers().size());
    for (const ptx::RegisterName& r : f.registers) builder_.new_register(width_of(r.type));
    TANDEM_TRY(place_symbols(frame));
    if (depth == 0) {
      for (size_t n = 0; n < f.parameters.size(); ++n)
        frame->places[static_cast<size_t>(f.parameters[n])] = {
            Space::param, static_cast<uint64_t>(code_->parameter_offsets[n]), false, -1};
    }
    Frame* const outer = builder_.enter(frame);
    for (const Instruction& i : f.instructions) {
      frame->starts.push_back(builder_.position());
      TANDEM_TRY(instruction(i, frame, depth));
    }
    frame->starts.push_back(builder_.position());
    for (const auto& [op, target] : frame->branches)
      code_->ops[static_cast<size_t>(op)].d = frame->starts[static_cast<size_t>(target)];
    for (const auto& [detail, targets] : frame->tables)
      for (const int32_t target : targets) detail->targets.push_back(frame->starts[static_cast<size_t>(target)]);
    if (depth == 0) {
      Instruction last;
      builder_.begin(last, std::max(0, static_cast<int32_t>(code_->sources.size()) - 1));
      emit_exit(builder_);
    }
    builder_.enter(outer);
    return {};
  }

  Status instruction(const Instruction& i, Frame* frame, int depth) {
    const auto source = static_cast<int32_t>(code_->sources.size());
    code_->sources.push_back(&i);
    builder_.begin(i, source);
    if (code_->ops.size() > kMaxOps)
      return builder_.refuse(
          i, "the kernel must have at most " + std::to_string(kMaxOps) + " operations: split the kernel");
    if (i.opcode == "call") return call(i, frame, depth);
    if (i.opcode == "ret" && depth > 0) {
      frame->returns.push_back(builder_.position());
      builder_.emit(Action(Shape::branch), -1);
      return {};
    }
    const auto found = decoders().find(i.opcode);
    if (found == decoders().end())
      return builder_.refuse(i, "must be an opcode that the virtual GPU executes: use another instruction");
    return found->second(builder_, i);
  }

  Status call(const Instruction& i, Frame* frame, int depth) {
    if (i.operands.size() != 3 || i.operands[1].kind != Operand::Kind::function)
      return builder_.refuse(i, "a call must name a function, not a register: write the name");
    const std::string& name = i.operands[1].text;
    const Function* callee = code_->module->find(name);
    if (callee == nullptr || !callee->has_body) return call_builtin(builder_, i, name);
    const std::vector<Operand>& results = i.operands[0].parts;
    const std::vector<Operand>& arguments = i.operands[2].parts;
    if (arguments.size() != callee->parameters.size() || results.size() != callee->results.size())
      return builder_.refuse(i, name + " has another number of parameters: correct the arguments");
    Frame inner;
    inner.caller = frame;
    inner.places.resize(callee->symbols.size());
    // The callee uses .param variables of the caller directly. All other arguments are copied.
    for (size_t n = 0; n < results.size(); ++n)
      TANDEM_TRY(pass(i, results[n], &inner.places[static_cast<size_t>(callee->results[n])]));
    for (size_t n = 0; n < arguments.size(); ++n)
      TANDEM_TRY(pass(i, arguments[n], &inner.places[static_cast<size_t>(callee->parameters[n])]));
    // A guarded call is skipped by a jump.
    int32_t skip = -1;
    if (i.guard >= 0) {
      skip = builder_.position();
      Op& op = builder_.emit(Action(Shape::branch), -1);
      op.flip = ~op.flip;
      Instruction plain;
      builder_.begin(plain, static_cast<int32_t>(code_->sources.size()) - 1);
    }
    TANDEM_TRY(body(*callee, &inner, depth + 1));
    const int32_t behind = builder_.position();
    for (const int32_t op : inner.returns) code_->ops[static_cast<size_t>(op)].d = behind;
    if (skip >= 0) code_->ops[static_cast<size_t>(skip)].d = behind;
    return {};
  }

  Status pass(const Instruction& i, const Operand& operand, OperandPlace* place) {
    if (operand.kind == Operand::Kind::symbol && builder_.place(operand.symbol).space == Space::local) {
      *place = builder_.place(operand.symbol);
      return {};
    }
    if (operand.kind != Operand::Kind::reg) return builder_.refuse(i, "an argument must be a register: use mov");
    place->in_register = true;
    place->reg = builder_.frame()->registers + operand.reg;
    return {};
  }

  Code* code_;
  Builder builder_;
  std::map<std::string, uint64_t> shared_;
};

class DecodedProgram : public Program {
 public:
  const ptx::Module& module() const override { return *code.module; }
  const ptx::Function& function() const override { return *code.function; }
  const ptx::Instruction& source(int32_t instruction) const override {
    return *code.sources[static_cast<size_t>(instruction)];
  }
  int32_t parameter_bytes() const override { return code.parameter_bytes; }
  int32_t parameter_offset(int index) const override { return code.parameter_offsets[static_cast<size_t>(index)]; }
  int32_t static_shared_bytes() const override { return code.static_shared; }
  int32_t registers_needed() const override { return code.registers_needed; }
  std::vector<Buffer> variables() const override {
    std::vector<Buffer> list;
    for (size_t i = 0; i < code.module->variables.size(); ++i) {
      const ptx::Symbol& v = code.module->variables[i];
      if (code.memory->address[i] == nullptr) continue;
      list.push_back(
          {v.name, code.memory->address[i], static_cast<size_t>(v.bytes()), v.space == ptx::Space::global, true});
    }
    if (code.workspace)
      list.push_back({"workspace of the grid", code.workspace.get(), Code::kWorkspaceBytes, true, true});
    return list;
  }

  Code code;
};

}  // namespace

std::vector<std::span<const Family>> all_families() {
  return {arithmetic_families(), real_families(),    move_families(), memory_families(), control_families(),
          warp_families(),       barrier_families(), bulk_families(), matrix_families(), tcgen05_families()};
}

const Code& code_of(const Program& program) { return static_cast<const DecodedProgram&>(program).code; }

std::string Code::place(int32_t source) const {
  if (source < 0 || static_cast<size_t>(source) >= sources.size()) return "?";
  return ptx::place_text(*module, sources[static_cast<size_t>(source)]->location);
}

}  // namespace machine

Status Program::decode(std::shared_ptr<const ptx::Module> module, std::string_view entry, const Model& model,
                       std::unique_ptr<const Program>* program) {
  const ptx::Function* function = module->find(entry);
  if (function == nullptr || !function->is_entry)
    return Status::invalid("the kernel " + std::string(entry) + " must be in the module: correct the name");
  auto made = std::make_unique<machine::DecodedProgram>();
  made->code.module = module;
  made->code.memory = machine::memory_of(module);
  made->code.function = function;
  TANDEM_TRY(machine::KernelDecoder(&made->code, model).run());
  *program = std::move(made);
  return {};
}

}  // namespace tandem::vgpu
