// ld and st in all spaces, and hints about memory. PTX ISA, "Data Movement and Conversion Instructions".
#include "vgpu/src/machine/instructions/memory.h"

#include <cstring>
#include <type_traits>

#include "vgpu/src/machine/run/execute.h"
#include "vgpu/src/machine/run/resolve.h"

namespace tandem::vgpu::machine {
namespace {

using ptx::Instruction;
using ptx::Operand;
using ptx::Space;
using ptx::Type;

struct AccessDetail : Detail {  // in: address, then values of a store; out: values of a load
  AccessForm form;
  uint32_t element = 4;  // bytes
  bool sign = false;     // shorter than the register: extended by its sign
  bool wide_address = true;
  bool stores_constant = false;
  int64_t offset = 0;
  std::vector<uint8_t> widths;  // widths of the registers
};

// Whole naturally aligned words are read and written at once, because other host threads may access them concurrently.
// kOrder: the host's memory order, __ATOMIC_RELAXED except for strong accesses.
template <int kOrder, class T>
T load_word(const std::byte* at) {
  T value;
  if (reinterpret_cast<uintptr_t>(at) % sizeof(T) != 0)
    std::memcpy(&value, at, sizeof(T));
  else
    value = __atomic_load_n(reinterpret_cast<const T*>(at), kOrder);
  return value;
}
template <int kOrder, class T>
void store_word(std::byte* at, T value) {
  if (reinterpret_cast<uintptr_t>(at) % sizeof(T) != 0)
    std::memcpy(at, &value, sizeof(T));
  else
    __atomic_store_n(reinterpret_cast<T*>(at), value, kOrder);
}

// sign: the value is sign-extended.
template <int kOrder, class T>
uint64_t load_integer(const std::byte* at, bool sign) {
  const T value = load_word<kOrder, T>(at);
  return sign ? static_cast<uint64_t>(static_cast<std::make_signed_t<T>>(value)) : value;
}

template <int kOrder>
uint64_t load_element(const std::byte* at, uint32_t bytes, bool sign) {
  switch (bytes) {
    case 1: return load_integer<kOrder, uint8_t>(at, sign);
    case 2: return load_integer<kOrder, uint16_t>(at, sign);
    case 4: return load_integer<kOrder, uint32_t>(at, sign);
    default: return load_word<kOrder, uint64_t>(at);
  }
}

void put(Context& context, int32_t row, int width, uint32_t lane, uint64_t value) {
  if (width == 8)
    context.row<uint64_t>(row)[lane] = value;
  else
    context.row(row)[lane] = width == 2 ? static_cast<uint16_t>(value) : static_cast<uint32_t>(value);
}

template <int kOrder>
void load_lanes(Context& context, const AccessDetail& detail, const Places& places) {
  const uint32_t lanes = context.mask & ~places.nothing;
  for (size_t n = 0; n < detail.out.size(); ++n) {
    const int32_t row = detail.out[n];
    const uint32_t skip = static_cast<uint32_t>(n) * detail.element;
    if (row < 0) continue;
    if (detail.element == 4 && detail.widths[n] == 4) {
      uint32_t* d = context.row(row);
      TANDEM_EACH_LANE(lane, lanes) d[lane] = load_word<kOrder, uint32_t>(places.at[lane] + skip);
    } else if (detail.element == 16) {
      TANDEM_EACH_LANE(lane, lanes)
      for (uint32_t half = 0; half < 2; ++half)
        context.row<uint64_t>(row)[2 * lane + half] = load_word<kOrder, uint64_t>(places.at[lane] + skip + 8 * half);
    } else {
      TANDEM_EACH_LANE(lane, lanes)
      put(context, row, detail.widths[n], lane,
          load_element<kOrder>(places.at[lane] + skip, detail.element, detail.sign));
    }
    TANDEM_EACH_LANE(lane, context.mask & places.nothing) put(context, row, detail.widths[n], lane, 0);
  }
}

Step load_op(Context& context, const Op& op) {
  const auto& detail = op.as<AccessDetail>();
  Places places;
  if (!resolve(context, op, detail.form, {detail.in[0], detail.wide_address, detail.offset}, &places)) return Step::end;
  if (detail.form.atomic && places.global != 0)
    load_lanes<__ATOMIC_ACQUIRE>(context, detail, places);
  else
    load_lanes<__ATOMIC_RELAXED>(context, detail, places);
  return Step::next;
}

template <int kOrder>
void store_lanes(Context& context, const AccessDetail& detail, const Places& places) {
  const uint32_t lanes = context.mask & ~places.nothing;
  for (size_t n = 1; n < detail.in.size(); ++n) {
    const auto skip = static_cast<uint32_t>(n - 1) * detail.element;
    const int32_t row = detail.in[n];
    TANDEM_EACH_LANE(lane, lanes) {
      std::byte* const at = places.at[lane] + skip;
      const uint32_t narrow = context.row(row)[lane];
      switch (detail.element) {
        case 1: store_word<kOrder>(at, static_cast<uint8_t>(narrow)); break;
        case 2: store_word<kOrder>(at, static_cast<uint16_t>(narrow)); break;
        case 4: store_word<kOrder>(at, narrow); break;
        case 8: store_word<kOrder>(at, context.row<uint64_t>(row)[lane]); break;
        default:
          for (uint32_t half = 0; half < 2; ++half)
            store_word<kOrder>(at + 8 * half, context.row<uint64_t>(row)[2 * lane + half]);
      }
    }
  }
}

class Stored final : public StoredValues {
 public:
  Stored(const Context& context, const AccessDetail& detail, const Places& places)
      : context_(context), detail_(detail), places_(places) {}

  bool change_nothing(int lane) const override {
    const auto words_of_element = std::max(detail_.element / 8, 1u), bytes = std::min(detail_.element, 8u);
    const auto l = static_cast<uint32_t>(lane);
    for (size_t n = 1; n < detail_.in.size(); ++n) {
      const std::byte* const at = places_.at[lane] + (n - 1) * detail_.element;
      for (uint32_t word = 0; word < words_of_element; ++word) {
        uint64_t value = 0;
        if (bytes == 8)
          value = context_.row<uint64_t>(detail_.in[n])[words_of_element * l + word];
        else
          value = context_.row(detail_.in[n])[l] & (UINT64_MAX >> (64 - 8 * bytes));
        if (load_element<__ATOMIC_RELAXED>(at + 8 * word, bytes, false) != value) return false;
      }
    }
    return true;
  }
  bool are_constant() const override { return detail_.stores_constant; }

 private:
  const Context& context_;
  const AccessDetail& detail_;
  const Places& places_;
};

Step store_op(Context& context, const Op& op) {
  const auto& detail = op.as<AccessDetail>();
  Places places;
  const Stored stored(context, detail, places);
  if (!detail.form.atomic) places.stored = &stored;
  if (!resolve(context, op, detail.form, {detail.in[0], detail.wide_address, detail.offset}, &places)) return Step::end;
  ++context.cluster.events;
  if (detail.form.atomic && places.global != 0)
    store_lanes<__ATOMIC_RELEASE>(context, detail, places);
  else
    store_lanes<__ATOMIC_RELAXED>(context, detail, places);
  return Step::next;
}

// Decodes the address and type of ld, st, atom and red. The caller decodes the remaining words.
Status address_and_type(Builder& b, const Instruction& i, Modifiers& words, const Operand& operand,
                        AccessDetail* detail, Type* type) {
  take_order(words, &detail->form);
  const bool is_of_entry = b.frame()->caller == nullptr || i.has("param::entry");
  take_space(words, &detail->form);
  take_cache_hints(words);
  *type = words.take_type();
  if (*type == Type::none) return b.refuse(i, "must name its type: add the type");
  if (operand.kind != Operand::Kind::address) return b.refuse(i, "must have an address: add the operand");
  // Variables of the parameter space of calls lie in local memory.
  const Operand& base = operand.parts[0];
  if (base.kind == Operand::Kind::symbol && detail->form.space == Space::param) {
    const OperandPlace& place = b.place(base.symbol);
    if (place.in_register) return b.refuse(i, "the parameter must not be a register: declare it as .param");
    if (place.space == Space::local) detail->form.space = Space::local;
  } else if (detail->form.space == Space::param && !is_of_entry) {
    detail->form.space = Space::local;  // PTX ISA, "ld": in a device function .param is .param::func
  }
  const int32_t address = b.address(operand, &detail->offset);
  if (b.failed()) return b.fail(i);
  detail->in.push_back(address);
  detail->wide_address = b.width(address) == 8;
  detail->element = static_cast<uint32_t>(ptx::bits_of(*type)) / 8;
  detail->sign = is_signed(*type);
  return {};
}

int register_width(Builder& b, const Operand& operand) {
  if (operand.kind != Operand::Kind::reg) return 4;
  const Type declared = b.frame()->function->registers[static_cast<size_t>(operand.reg)].type;
  return std::max(ptx::bits_of(declared) / 8, 1);
}

Status ld(Builder& b, const Instruction& i) {
  Modifiers words(i);
  auto detail = std::make_unique<AccessDetail>();
  const uint32_t count = take_vector(words);
  words.take("nc");
  Type type = Type::none;
  if (i.operands.size() < 2) return b.refuse(i, "must have the operands that PTX defines: correct the operands");
  TANDEM_TRY(address_and_type(b, i, words, i.operands[1], detail.get(), &type));
  TANDEM_TRY(b.unknown(i, words));
  const bool vector = i.operands[0].kind == Operand::Kind::vector;
  if ((vector ? i.operands[0].parts.size() : 1) != count) {
    return b.refuse(i, "the number of registers must fit the shape: correct the list");
  }
  for (size_t n = 0; n < count; ++n) {
    const Operand& d = vector ? i.operands[0].parts[n] : i.operands[0];
    const int width = register_width(b, d);
    if (d.kind == Operand::Kind::sink) {
      detail->out.push_back(-1);
    } else if (d.kind != Operand::Kind::reg || static_cast<uint32_t>(width) < detail->element) {
      return b.refuse(i, "a destination must be as wide as its type: declare another register");
    } else {
      detail->out.push_back(b.frame()->registers + d.reg);
    }
    detail->widths.push_back(static_cast<uint8_t>(width));
  }
  detail->form.reads = true;
  detail->form.bytes = detail->form.alignment = detail->element * count;
  b.emit(load_op, std::move(detail));
  return {};
}

Status st(Builder& b, const Instruction& i) {
  Modifiers words(i);
  auto detail = std::make_unique<AccessDetail>();
  if (i.has("async") || i.has("bulk")) return decode_st_async(b, i);
  const uint32_t count = take_vector(words);
  Type type = Type::none;
  if (i.operands.size() < 2) return b.refuse(i, "must have the operands that PTX defines: correct the operands");
  TANDEM_TRY(address_and_type(b, i, words, i.operands[0], detail.get(), &type));
  TANDEM_TRY(b.unknown(i, words));
  const bool vector = i.operands[1].kind == Operand::Kind::vector;
  if ((vector ? i.operands[1].parts.size() : 1) != count) {
    return b.refuse(i, "the number of registers must fit the shape: correct the list");
  }
  detail->stores_constant = true;
  for (size_t n = 0; n < count; ++n) {
    const Operand& value = vector ? i.operands[1].parts[n] : i.operands[1];
    detail->in.push_back(b.source(value, type));
    detail->stores_constant = detail->stores_constant && b.is_constant(value);
  }
  if (b.failed()) return b.fail(i);
  detail->form.writes = true;
  detail->form.bytes = detail->form.alignment = detail->element * count;
  b.emit(store_op, std::move(detail));
  return {};
}

Status hint(Builder& b, const Instruction& i) {
  (void)b;
  (void)i;
  return {};
}

// createpolicy returns an arbitrary value, because policies have no effect.
Status createpolicy(Builder& b, const Instruction& i) {
  const int32_t d = b.destination(i.operands[0], Type::b64);
  if (b.failed()) return b.fail(i);
  b.copy(d, b.constant(8, 0x1000000000000000));
  return {};
}

constexpr Family kFamilies[] = {
    {"ld", ld},         {"ldu", ld},         {"st", st},        {"atom", decode_atomic}, {"red", decode_atomic},
    {"prefetch", hint}, {"prefetchu", hint}, {"discard", hint}, {"applypriority", hint}, {"createpolicy", createpolicy},
};

}  // namespace

void take_order(Modifiers& words, AccessForm* form) {
  const std::string order = words.take_of({"weak", "volatile", "relaxed", "acquire", "release", "acq_rel", "mmio"});
  if (order == "mmio") words.take("relaxed");
  const std::string scope = words.take_of({"cta", "cluster", "gpu", "sys"});
  form->scope = scope == "cta"                                             ? Scope::cta
                : scope == "cluster"                                       ? Scope::cluster
                : scope == "sys" || order == "volatile" || order == "mmio" ? Scope::system
                                                                           : Scope::gpu;
  form->order = order == "acquire"                 ? Order::acquire
                : order == "release"               ? Order::release
                : order == "acq_rel"               ? Order::acquire_release
                : order.empty() || order == "weak" ? Order::weak
                                                   : Order::relaxed;
  form->atomic = form->order != Order::weak;
}

void take_space(Modifiers& words, AccessForm* form) {
  const std::string space = words.take_of(
      {"global", "shared", "shared::cta", "shared::cluster", "local", "const", "param", "param::entry", "param::func"});
  form->cluster = space == "shared::cluster";
  form->space = space == "global"             ? Space::global
                : space.starts_with("shared") ? Space::shared
                : space == "local"            ? Space::local
                : space == "const"            ? Space::constant
                : space.starts_with("param")  ? Space::param
                                              : Space::generic;
}

void take_cache_hints(Modifiers& words) {
  words.take_of({"ca", "cg", "cs", "lu", "cv", "wb", "wt"});
  while (!words.take_prefix("L1::").empty() || !words.take_prefix("L2::").empty()) {
  }
}

uint32_t take_vector(Modifiers& words) {
  const std::string vector = words.take_of({"v2", "v4", "v8"});
  return vector.empty() ? 1 : static_cast<uint32_t>(vector[1] - '0');
}

std::span<const Family> memory_families() { return kFamilies; }

}  // namespace tandem::vgpu::machine
