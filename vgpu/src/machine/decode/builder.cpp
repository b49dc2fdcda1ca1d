#include "vgpu/src/machine/decode/builder.h"

#include <bit>
#include <tuple>

#include "vgpu/src/machine/address.h"
#include "vgpu/src/machine/lanes/lanes.h"

namespace tandem::vgpu::machine {
namespace {

const std::unordered_map<std::string_view, Special>& special_names() {
  static const std::unordered_map<std::string_view, Special> names = {
      {"%tid.x", Special::tid_x},
      {"%tid.y", Special::tid_y},
      {"%tid.z", Special::tid_z},
      {"%ntid.x", Special::ntid_x},
      {"%ntid.y", Special::ntid_y},
      {"%ntid.z", Special::ntid_z},
      {"%ctaid.x", Special::ctaid_x},
      {"%ctaid.y", Special::ctaid_y},
      {"%ctaid.z", Special::ctaid_z},
      {"%nctaid.x", Special::nctaid_x},
      {"%nctaid.y", Special::nctaid_y},
      {"%nctaid.z", Special::nctaid_z},
      {"%laneid", Special::laneid},
      {"%warpid", Special::warpid},
      {"%nwarpid", Special::nwarpid},
      {"%smid", Special::smid},
      {"%nsmid", Special::nsmid},
      {"%gridid", Special::gridid},
      {"%clusterid.x", Special::clusterid_x},
      {"%clusterid.y", Special::clusterid_y},
      {"%clusterid.z", Special::clusterid_z},
      {"%nclusterid.x", Special::nclusterid_x},
      {"%nclusterid.y", Special::nclusterid_y},
      {"%nclusterid.z", Special::nclusterid_z},
      {"%cluster_ctaid.x", Special::cluster_ctaid_x},
      {"%cluster_ctaid.y", Special::cluster_ctaid_y},
      {"%cluster_ctaid.z", Special::cluster_ctaid_z},
      {"%cluster_nctaid.x", Special::cluster_nctaid_x},
      {"%cluster_nctaid.y", Special::cluster_nctaid_y},
      {"%cluster_nctaid.z", Special::cluster_nctaid_z},
      {"%cluster_ctarank", Special::cluster_ctarank},
      {"%cluster_nctarank", Special::cluster_nctarank},
      {"%is_explicit_cluster", Special::is_explicit_cluster},
      {"%lanemask_eq", Special::lanemask_eq},
      {"%lanemask_le", Special::lanemask_le},
      {"%lanemask_lt", Special::lanemask_lt},
      {"%lanemask_ge", Special::lanemask_ge},
      {"%lanemask_gt", Special::lanemask_gt},
      {"%dynamic_smem_size", Special::dynamic_smem_size},
      {"%total_smem_size", Special::total_smem_size},
      {"%aggr_smem_size", Special::total_smem_size},
  };
  return names;
}

}  // namespace

bool Modifiers::take(std::string_view word) {
  for (size_t i = 0; i < words_.size(); ++i) {
    if (used_[i] || words_[i] != word) continue;
    used_[i] = true;
    return true;
  }
  return false;
}

std::string Modifiers::take_of(std::initializer_list<std::string_view> words) {
  for (const std::string_view word : words)
    if (take(word)) return std::string(word);
  return "";
}

std::string Modifiers::take_prefix(std::string_view prefix) {
  for (size_t i = 0; i < words_.size(); ++i) {
    if (used_[i] || !words_[i].starts_with(prefix)) continue;
    used_[i] = true;
    return words_[i];
  }
  return "";
}

ptx::Type Modifiers::take_type() {
  for (size_t i = 0; i < words_.size(); ++i) {
    const ptx::Type type = used_[i] ? ptx::Type::none : ptx::type_named(words_[i]);
    if (type == ptx::Type::none) continue;
    used_[i] = true;
    return type;
  }
  return ptx::Type::none;
}

std::string Modifiers::take_first() {
  for (size_t i = 0; i < words_.size(); ++i) {
    if (used_[i]) continue;
    used_[i] = true;
    return words_[i];
  }
  return "";
}

std::string Modifiers::left() const {
  std::string text;
  for (size_t i = 0; i < words_.size(); ++i)
    if (!used_[i]) text += "." + words_[i];
  return text;
}

int width_of(ptx::Type type) {
  if (type == ptx::Type::pred) return 0;
  const int bits = ptx::bits_of(type);
  return bits <= 32 ? 4 : bits / 8;
}

bool is_signed(ptx::Type t) {
  return t == ptx::Type::s8 || t == ptx::Type::s16 || t == ptx::Type::s32 || t == ptx::Type::s64;
}

bool is_integer(ptx::Type t) {
  switch (t) {
    case ptx::Type::b8:
    case ptx::Type::b16:
    case ptx::Type::b32:
    case ptx::Type::b64:
    case ptx::Type::u8:
    case ptx::Type::u16:
    case ptx::Type::u32:
    case ptx::Type::u64: return true;
    default: return is_signed(t);
  }
}

std::string integer_name(ptx::Type type) { return str_cat(is_signed(type) ? "s" : "u", ptx::bits_of(type)); }

Status Builder::refuse(const ptx::Instruction& i, const std::string& why) const {
  return Status::unsupported(str_cat("PTX line ", i.location.ptx_line, ": ", i.full_name(), ": ", why));
}

Status Builder::unknown(const ptx::Instruction& i, const Modifiers& words) const {
  return words.left().empty() ? Status()
                              : refuse(i, words.left() + " must be a supported modifier: remove the modifier");
}

Status Builder::fail(const ptx::Instruction& i) {
  const Status status = refuse(i, failure_);
  failure_.clear();
  return status;
}

void Builder::begin(const ptx::Instruction& i, int32_t source) {
  guard_ = i.guard < 0 ? -1 : frame_->registers + i.guard;
  guard_negated_ = i.guard_negated;
  source_ = source;
  first_ = true;
}

int32_t Builder::new_register(int width) {
  registers_.push_back({width, false, {}});
  return static_cast<int32_t>(registers_.size()) - 1;
}

int32_t Builder::special(Special special, int width) {
  const auto [found, is_new] = initials_.try_emplace({static_cast<int>(special), width, 0}, 0);
  if (is_new) {
    found->second = new_register(width);
    registers_.back().is_initial = true;
    registers_.back().initial = {special, static_cast<uint8_t>(width), 0, 0};
  }
  return found->second;
}

int32_t Builder::constant(int width, uint64_t value) {
  if (width == 4) value &= 0xffffffffu;
  const auto [found, is_new] = initials_.try_emplace({static_cast<int>(Special::constant), width, value}, 0);
  if (is_new) {
    found->second = new_register(width);
    registers_.back().is_initial = true;
    registers_.back().initial = {Special::constant, static_cast<uint8_t>(width), 0, value};
  }
  return found->second;
}

int32_t Builder::carry() {
  if (carry_ < 0) carry_ = new_register(4);
  return carry_;
}

int32_t Builder::of_register(const ptx::Operand& operand, int width) {
  const int32_t reg = frame_->registers + operand.reg;
  const int have = this->width(reg);
  if (have == width) {
    if (!operand.negated) return reg;
    const int32_t inverse = new_register(0);
    emit_lanes("not.pred", inverse, {reg});
    return inverse;
  }
  const std::string& name = frame_->function->registers[static_cast<size_t>(operand.reg)].name;
  if (have < width || width == 0)
    return failing("register " + name + " must be as wide as the operand: declare another register");
  int32_t narrow = reg;
  if (have == 16) {
    narrow = new_register(8);
    emit_lanes("part.64.128.0", narrow, {reg});
  }
  if (width == 8) return narrow;
  const int32_t low = new_register(4);
  emit_lanes("part.32.64.0", low, {narrow});
  return low;
}

int32_t Builder::of_symbol(const ptx::Operand& operand, int width) {
  const OperandPlace& p = place(operand.symbol);
  if (p.in_register) return p.reg;
  const uint64_t at = p.at + operand.bits;
  switch (p.space) {
    case ptx::Space::shared: {
      const auto [found, is_new] = initials_.try_emplace({static_cast<int>(Special::shared_address), width, at}, 0);
      if (is_new) {
        found->second = new_register(width);
        registers_.back().is_initial = true;
        registers_.back().initial = {Special::shared_address, static_cast<uint8_t>(width), 0, at};
      }
      return found->second;
    }
    case ptx::Space::param: return constant(width, kParamWindow + at);
    default: return constant(width, at);
  }
}

int32_t Builder::source(const ptx::Operand& operand, ptx::Type type) {
  using Kind = ptx::Operand::Kind;
  const int width = width_of(type), bits = ptx::bits_of(type);
  switch (operand.kind) {
    case Kind::reg: return of_register(operand, width);
    case Kind::integer:
      if (type == ptx::Type::pred) return constant(0, operand.bits != 0);
      return constant(width, bits < 64 ? operand.bits & ((uint64_t{1} << bits) - 1) : operand.bits);
    case Kind::real: {
      const double value = operand.is_f32
                               ? static_cast<double>(std::bit_cast<float>(static_cast<uint32_t>(operand.bits)))
                               : std::bit_cast<double>(operand.bits);
      if (width == 8) return constant(8, operand.is_f32 ? std::bit_cast<uint64_t>(value) : operand.bits);
      return constant(4, operand.is_f32 ? operand.bits : std::bit_cast<uint32_t>(static_cast<float>(value)));
    }
    case Kind::special: {
      const auto found = special_names().find(operand.text);
      if (found != special_names().end())
        return special(found->second, found->second == Special::is_explicit_cluster ? 0 : width);
      if (operand.text == "%reserved_smem_offset_begin" || operand.text == "%current_graph_exec")
        return constant(width, 0);
      if (operand.text == "%reserved_smem_offset_end" || operand.text == "%reserved_smem_offset_cap")
        return constant(width, kReservedShared);
      // cooperative_groups::this_grid() reads the address of the workspace in %envreg1 and %envreg2. The driver sets
      // the other envregs to 0.
      if (operand.text == "%envreg1" || operand.text == "%envreg2") {
        if (!code_->workspace) code_->workspace = std::make_unique<std::byte[]>(Code::kWorkspaceBytes);
        return special(operand.text == "%envreg1" ? Special::workspace_high : Special::workspace_low, width);
      }
      if (operand.text.starts_with("%envreg")) return constant(width, 0);
      return failing("special register " + operand.text + " must be supported: use another register");
    }
    case Kind::symbol: return of_symbol(operand, width);
    default: return failing("an operand must be a register, constant or symbol: correct the operand");
  }
}

namespace {

// Registers of a function whose only definitions move the same immediate value to them.
std::vector<bool> constants_of(const ptx::Function& function) {
  using Kind = ptx::Operand::Kind;
  const size_t count = function.registers.size();
  std::vector<bool> defined(count, false), constant(count, true);
  std::vector<uint64_t> values(count, 0);
  const auto define = [&](const ptx::Operand& d, const ptx::Operand* value) {
    if (d.kind != Kind::reg) return;
    const auto reg = static_cast<size_t>(d.reg);
    if (value == nullptr || (defined[reg] && values[reg] != value->bits)) constant[reg] = false;
    defined[reg] = true;
    if (value != nullptr) values[reg] = value->bits;
  };
  for (const ptx::Instruction& i : function.instructions) {
    if (i.operands.empty()) continue;
    const bool moves = i.opcode == "mov" && i.operands.size() == 2 && i.guard < 0 &&
                       (i.operands[1].kind == Kind::integer || i.operands[1].kind == Kind::real);
    const ptx::Operand& d = i.operands[0];
    define(d, moves ? &i.operands[1] : nullptr);
    if (d.kind == Kind::address) continue;
    for (const ptx::Operand& part : d.parts) {
      define(part, nullptr);
      for (const ptx::Operand& inner : part.parts) define(inner, nullptr);
    }
  }
  for (size_t reg = 0; reg < count; ++reg) constant[reg] = constant[reg] && defined[reg];
  return constant;
}

}  // namespace

bool Builder::is_constant(const ptx::Operand& operand) {
  if (operand.kind == ptx::Operand::Kind::integer || operand.kind == ptx::Operand::Kind::real) return true;
  if (operand.kind != ptx::Operand::Kind::reg || operand.negated) return false;
  if (frame_->constants.empty()) frame_->constants = constants_of(*frame_->function);
  return frame_->constants[static_cast<size_t>(operand.reg)];
}

int32_t Builder::destination(const ptx::Operand& operand, ptx::Type type) {
  const int width = width_of(type);
  if (operand.kind == ptx::Operand::Kind::sink) return new_register(width);
  if (operand.kind != ptx::Operand::Kind::reg)
    return failing("the destination must be a register: correct the operand");
  const int32_t reg = frame_->registers + operand.reg;
  if (this->width(reg) == width) return reg;
  return failing("register " + frame_->function->registers[static_cast<size_t>(operand.reg)].name +
                 " must have the width of its type: declare another register");
}

int32_t Builder::address(const ptx::Operand& operand, int64_t* offset, int width) {
  using Kind = ptx::Operand::Kind;
  const ptx::Operand& base = operand.kind == Kind::address ? operand.parts[0] : operand;
  *offset = operand.kind == Kind::address ? static_cast<int64_t>(operand.bits) : 0;
  if (base.kind == Kind::reg) {
    const int have = this->width(frame_->registers + base.reg);
    if (have != 4 && have != 8)
      return failing("the address must be in a register of 32 or 64 bits: use such a register");
    return width == 0 || width == have ? frame_->registers + base.reg : of_register(base, width);
  }
  if (base.kind != Kind::symbol && base.kind != Kind::integer && base.kind != Kind::special)
    return failing("the address must be a register, a symbol or a number: correct the operand");
  const int wide = width == 0 ? 8 : width;
  return source(base, wide == 8 ? ptx::Type::b64 : ptx::Type::b32);
}

Op& Builder::emit(Action action, int32_t d, std::initializer_list<int32_t> sources) {
  Op op;
  op.action = action;
  op.d = d;
  op.width = static_cast<uint8_t>(d < 0 ? 0 : width(d));
  int32_t* const places[] = {&op.a, &op.b, &op.c, &op.e};
  size_t n = 0;
  for (const int32_t s : sources) *places[n++] = s;
  op.guard = guard_ < 0 ? always() : guard_;
  op.flip = guard_ >= 0 && guard_negated_ ? ~0u : 0u;
  op.source = source_;
  op.first = first_;
  first_ = false;
  code_->ops.push_back(op);
  return code_->ops.back();
}

Op& Builder::emit(Exec exec, std::unique_ptr<Detail> detail) {
  Op& op = emit(Action(exec), -1);
  op.detail = detail.get();
  if (detail) code_->details.push_back(std::move(detail));
  return op;
}

bool Builder::emit_lanes(const std::string& name, int32_t d, std::initializer_list<int32_t> sources) {
  const Action action = lane_function(name);
  if (action.shape == Shape::none) return false;
  emit(action, d, sources);
  return true;
}

void Builder::copy(int32_t d, int32_t a) {
  emit_lanes(str_cat("copy.", width(d)), d, {a});
  code_->ops.back().is_copy = width(d) == 4;
}

int32_t Builder::narrow_destination(const ptx::Operand& operand, ptx::Type type, int32_t* wide) {
  *wide = -1;
  if (operand.kind == ptx::Operand::Kind::sink) return new_register(width_of(type));
  if (operand.kind != ptx::Operand::Kind::reg)
    return failing("the destination must be a register: correct the operand");
  const int32_t reg = frame_->registers + operand.reg;
  const ptx::Type declared = frame_->function->registers[static_cast<size_t>(operand.reg)].type;
  if (ptx::bits_of(declared) < ptx::bits_of(type))
    return failing("the destination must be as wide as the type: declare another register");
  if (ptx::bits_of(declared) == ptx::bits_of(type)) return reg;
  *wide = reg;
  wide_bits_ = ptx::bits_of(declared);
  return new_register(width_of(type));
}

void Builder::widen(int32_t wide, int32_t narrow, ptx::Type type) {
  if (wide < 0) return;
  const std::string from = is_integer(type) ? integer_name(type) : str_cat("u", ptx::bits_of(type));
  emit_lanes(str_cat("cvt.u", wide_bits_, ".", from), wide, {narrow});
}

int64_t Builder::local_space(int64_t bytes, int64_t alignment) {
  const int64_t at = (code_->local_bytes + alignment - 1) / alignment * alignment;
  code_->local_bytes = static_cast<int32_t>(at + bytes);
  return at;
}

}  // namespace tandem::vgpu::machine
