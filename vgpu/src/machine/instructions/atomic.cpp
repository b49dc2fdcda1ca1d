// atom and red, on memory that other host threads may use at the same time. PTX ISA, "atom", "red".
#include <bit>
#include <cmath>
#include <cstring>
#include <mutex>

#include "vgpu/src/machine/instructions/memory.h"
#include "vgpu/src/machine/run/execute.h"
#include "vgpu/src/units/numbers.h"

namespace tandem::vgpu::machine {
namespace {

using ptx::Instruction;
using ptx::Operand;
using ptx::Type;

enum class Atomic : uint8_t { add, min, max, inc, dec, bit_and, bit_or, bit_xor, exch, cas };

struct AtomicDetail : Detail {  // in: address, b (by element), c of cas; out: d (by element)
  AccessForm form;
  Atomic operation = Atomic::add;
  Type type = Type::u32;
  uint32_t element = 4;
  uint32_t count = 1;
  bool wide_address = true;
  int64_t offset = 0;
};

template <class T>
T bits(uint64_t x) {
  if constexpr (sizeof(T) == 4)
    return std::bit_cast<T>(static_cast<uint32_t>(x));
  else
    return std::bit_cast<T>(x);
}

// flushes: subnormal float32 counts as zero, but only in global memory.
uint64_t add_real(Type type, uint64_t a, uint64_t b, bool flushes) {
  using units::Format;
  const auto half = [](Format f, uint64_t x, uint64_t y) -> uint64_t {
    return units::encode(
        units::decode(static_cast<uint32_t>(x & 0xffff), f) + units::decode(static_cast<uint32_t>(y & 0xffff), f), f);
  };
  const auto flush = [&](float x) { return flushes && std::fabs(x) < 0x1p-126f ? std::copysign(0.0f, x) : x; };
  const auto image = [](float x) -> uint64_t { return x == x ? std::bit_cast<uint32_t>(x) : 0x7fffffffu; };
  switch (type) {
    case Type::f32: return image(flush(flush(bits<float>(a)) + flush(bits<float>(b))));
    case Type::f64: return std::bit_cast<uint64_t>(bits<double>(a) + bits<double>(b));
    case Type::f16: return half(Format::f16, a, b);
    case Type::bf16: return half(Format::bf16, a, b);
    case Type::f16x2: return half(Format::f16, a, b) | half(Format::f16, a >> 16, b >> 16) << 16;
    default: return half(Format::bf16, a, b) | half(Format::bf16, a >> 16, b >> 16) << 16;
  }
}

uint64_t extreme_half(Type type, bool least, uint64_t a, uint64_t b) {
  const auto format = type == Type::f16 || type == Type::f16x2 ? units::Format::f16 : units::Format::bf16;
  const auto pick = [&](uint64_t x, uint64_t y) -> uint64_t {
    const float u = units::decode(static_cast<uint32_t>(x & 0xffff), format),
                v = units::decode(static_cast<uint32_t>(y & 0xffff), format);
    if (u != u) return y & 0xffff;
    if (v != v) return x & 0xffff;
    return (least ? u < v || (u == v && std::signbit(u)) : u > v || (u == v && !std::signbit(u))) ? x & 0xffff
                                                                                                  : y & 0xffff;
  };
  const bool two = type == Type::f16x2 || type == Type::bf16x2;
  return pick(a, b) | (two ? pick(a >> 16, b >> 16) << 16 : 0);
}

bool less(Type type, uint64_t a, uint64_t b) {
  if (type == Type::s32) return static_cast<int32_t>(a) < static_cast<int32_t>(b);
  if (type == Type::s64) return static_cast<int64_t>(a) < static_cast<int64_t>(b);
  return a < b;
}

bool is_half(Type t) { return t == Type::f16 || t == Type::bf16 || t == Type::f16x2 || t == Type::bf16x2; }

// Returns the new value of memory. c: the third operand of cas.
uint64_t result_of(const AtomicDetail& d, uint64_t old, uint64_t b, uint64_t c, bool global) {
  switch (d.operation) {
    case Atomic::add:
      return is_half(d.type) || d.type == Type::f32 || d.type == Type::f64 ? add_real(d.type, old, b, global) : old + b;
    case Atomic::min: return is_half(d.type) ? extreme_half(d.type, true, old, b) : less(d.type, b, old) ? b : old;
    case Atomic::max: return is_half(d.type) ? extreme_half(d.type, false, old, b) : less(d.type, old, b) ? b : old;
    case Atomic::inc: return static_cast<uint32_t>(old) >= static_cast<uint32_t>(b) ? 0 : old + 1;
    case Atomic::dec:
      return static_cast<uint32_t>(old) == 0 || static_cast<uint32_t>(old) > static_cast<uint32_t>(b) ? b : old - 1;
    case Atomic::bit_and: return old & b;
    case Atomic::bit_or: return old | b;
    case Atomic::bit_xor: return old ^ b;
    case Atomic::exch: return b;
    case Atomic::cas: return old == b ? c : old;
  }
  return old;
}

template <class T>
uint64_t update(const AtomicDetail& d, std::byte* at, uint64_t b, uint64_t c, bool global, bool* changed) {
  auto* word = reinterpret_cast<T*>(at);
  T old = __atomic_load_n(word, __ATOMIC_SEQ_CST);
  for (;;) {
    const T made = static_cast<T>(result_of(d, old, b, c, global));
    if (__atomic_compare_exchange_n(word, &old, made, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST)) {
      *changed = *changed || made != old;
      return old;
    }
  }
}

// Updates 16 bytes under a lock, because hosts need not have such atomics. Only exch and cas exist.
void update_128(const AtomicDetail& d, std::byte* at, const std::byte* b, const std::byte* c, std::byte* old) {
  static std::mutex mutex;
  const std::lock_guard lock(mutex);
  std::memcpy(old, at, 16);
  if (d.operation == Atomic::exch)
    std::memcpy(at, b, 16);
  else if (std::memcmp(old, b, 16) == 0)
    std::memcpy(at, c, 16);
}

uint64_t element(Context& context, const AtomicDetail& d, int32_t row, uint32_t lane) {
  return d.element == 8   ? context.row<uint64_t>(row)[lane]
         : d.element == 2 ? context.row(row)[lane] & 0xffff
                          : context.row(row)[lane];
}

void one(Context& context, const AtomicDetail& d, const Places& places, uint32_t lane, bool* changed) {
  const bool cas = d.operation == Atomic::cas;
  if (d.element == 16) {
    std::byte old[16];
    update_128(d, places.at[lane], context.row<std::byte>(d.in[1]) + 16 * lane,
               cas ? context.row<std::byte>(d.in[2]) + 16 * lane : nullptr, old);
    *changed = true;
    if (!d.out.empty() && d.out[0] >= 0) std::memcpy(context.row<std::byte>(d.out[0]) + 16 * lane, old, 16);
    return;
  }
  const bool global = (places.global >> lane & 1) != 0;
  for (uint32_t n = 0; n < d.count; ++n) {
    std::byte* const at = places.at[lane] + n * d.element;
    const uint64_t b = element(context, d, d.in[1 + n], lane), c = cas ? element(context, d, d.in[2], lane) : 0;
    const uint64_t old = d.element == 2   ? update<uint16_t>(d, at, b, c, global, changed)
                         : d.element == 4 ? update<uint32_t>(d, at, b, c, global, changed)
                                          : update<uint64_t>(d, at, b, c, global, changed);
    if (d.out.empty() || d.out[n] < 0) continue;
    if (d.element == 8)
      context.row<uint64_t>(d.out[n])[lane] = old;
    else
      context.row(d.out[n])[lane] = static_cast<uint32_t>(old);
  }
}

Step atomic_op(Context& context, const Op& op) {
  const auto& detail = op.as<AtomicDetail>();
  Places places;
  if (!resolve(context, op, detail.form, {detail.in[0], detail.wide_address, detail.offset}, &places)) return Step::end;
  bool changed = false;
  const bool misaligned = [&] {
    bool any = false;
    TANDEM_EACH_LANE(lane, context.mask)
    any = any || reinterpret_cast<uintptr_t>(places.at[lane]) % detail.element != 0;
    return any;
  }();
  if (misaligned) {
    context.finds(Rule::misaligned, op, "", "an atomic operation must have a natural alignment: align the address",
                  true);
    return Step::end;
  }
  TANDEM_EACH_LANE(lane, context.mask & ~places.nothing) one(context, detail, places, lane, &changed);
  TANDEM_EACH_LANE(lane, context.mask & places.nothing)
  for (const int32_t row : detail.out)
    if (row >= 0 && detail.element != 16) context.row(row)[detail.element == 8 ? 2 * lane : lane] = 0;
  if (changed) ++context.cluster.events;
  return Step::next;
}

bool exists(Atomic operation, Type type) {
  const bool real = type == Type::f32 || type == Type::f64;
  switch (operation) {
    case Atomic::add: return type != Type::b128 && ptx::bits_of(type) >= 16;
    case Atomic::min:
    case Atomic::max: return !real && type != Type::b128;
    case Atomic::inc:
    case Atomic::dec: return type == Type::u32;
    case Atomic::bit_and:
    case Atomic::bit_or:
    case Atomic::bit_xor: return is_integer(type) && width_of(type) <= 8;
    default: return !real && !is_half(type);
  }
}

}  // namespace

Status decode_atomic(Builder& b, const Instruction& i) {
  if (i.has("async")) return decode_red_async(b, i);
  Modifiers words(i);
  auto detail = std::make_unique<AtomicDetail>();
  const bool returns = i.opcode == "atom";
  const std::string names[] = {"add", "min", "max", "inc", "dec", "and", "or", "xor", "exch", "cas"};
  size_t operation = 0;
  while (operation < 10 && !words.take(names[operation])) ++operation;
  if (operation == 10) return b.refuse(i, "must be an operation that the virtual GPU executes: use another operation");
  detail->operation = static_cast<Atomic>(operation);
  take_order(words, &detail->form);
  take_space(words, &detail->form);
  words.take("noftz");
  take_cache_hints(words);
  detail->count = take_vector(words);
  const Type type = detail->type = words.take_type();
  TANDEM_TRY(b.unknown(i, words));
  if (type == Type::none || !exists(detail->operation, type)) {
    return b.refuse(i, "must have a form that the virtual GPU executes: use another form");
  }
  const size_t first = returns ? 1 : 0;
  if (i.operands.size() < first + 2 || (detail->operation == Atomic::cas && i.operands.size() < 4))
    return b.refuse(i, "must have the operands that PTX defines: correct the operands");
  const int32_t address = b.address(i.operands[first], &detail->offset);
  if (b.failed()) return b.fail(i);
  detail->wide_address = b.width(address) == 8;
  detail->in.push_back(address);
  const auto list = [&](const Operand& operand) {
    return operand.kind == Operand::Kind::vector ? operand.parts : std::vector<Operand>{operand};
  };
  for (const Operand& operand : list(i.operands[first + 1])) detail->in.push_back(b.source(operand, type));
  if (detail->operation == Atomic::cas) detail->in.push_back(b.source(i.operands[first + 2], type));
  if (returns)
    for (const Operand& operand : list(i.operands[0]))
      detail->out.push_back(operand.kind == Operand::Kind::sink ? -1 : b.destination(operand, type));
  if (b.failed()) return b.fail(i);
  detail->element = static_cast<uint32_t>(ptx::bits_of(type)) / 8;
  detail->form.reads = detail->form.writes = detail->form.atomic = true;
  if (detail->form.order == Order::weak) detail->form.order = Order::relaxed;
  detail->form.bytes = detail->form.alignment = detail->element * detail->count;
  b.emit(atomic_op, std::move(detail));
  return {};
}

}  // namespace tandem::vgpu::machine
