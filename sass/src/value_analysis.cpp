#include "sass/src/value_analysis.h"

#include <algorithm>
#include <charconv>

#include "base/text.h"
#include "sass/src/units.h"

namespace tandem::machine_code {
namespace {

bool is_predicate(std::string_view operand) {
  if (operand.starts_with('!')) operand.remove_prefix(1);
  if (operand.starts_with('U')) operand.remove_prefix(1);
  return operand == "PT" || (operand.size() == 2 && operand[0] == 'P' && operand[1] >= '0' && operand[1] <= '7');
}

Value number_in(std::string_view text) {
  bool negative = false;
  if (text.starts_with('-')) negative = true, text.remove_prefix(1);
  const int base = text.starts_with("0x") ? 16 : 10;
  if (base == 16) text.remove_prefix(2);
  uint32_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value, base);
  if (error != std::errc() || end != text.data() + text.size()) return std::nullopt;
  return negative ? 0 - value : value;
}

// Evaluates a logic operation bit by bit through a table of the eight combinations.
uint32_t look_up(uint32_t table, uint32_t a, uint32_t b, uint32_t c) {
  uint32_t result = 0;
  for (uint32_t k = 0; k < 8; ++k) {
    if ((table >> k & 1) != 0) result |= (k & 4 ? a : ~a) & (k & 2 ? b : ~b) & (k & 1 ? c : ~c);
  }
  return result;
}

uint32_t permuted(uint32_t a, uint32_t selector, uint32_t b) {
  const uint64_t bytes = uint64_t{b} << 32 | a;
  uint32_t result = 0;
  for (int k = 0; k < 4; ++k) {
    const uint32_t from = selector >> (4 * k) & 7;
    result |= static_cast<uint32_t>(bytes >> (8 * from) & 0xff) << (8 * k);
  }
  return result;
}

Value shifted(const Instruction& i, Value a, Value by, Value high) {
  if (!by) return std::nullopt;
  const uint32_t count = std::min<uint32_t>(*by, 32);
  const bool upper = i.has("HI");
  if (i.has("L")) {
    if (upper || !a) return std::nullopt;
    return count > 31 ? 0 : *a << count;
  }
  if (upper && i.has("S32") && high) return static_cast<uint32_t>(static_cast<int32_t>(*high) >> std::min(count, 31u));
  if (upper) return high ? Value(count > 31 ? 0 : *high >> count) : std::nullopt;
  if (!a || (count > 0 && !high)) return std::nullopt;
  return static_cast<uint32_t>((uint64_t{high.value_or(0)} << 32 | *a) >> count);
}

bool holds(std::string_view comparison, int64_t a, int64_t b) {
  if (comparison == "EQ") return a == b;
  if (comparison == "NE") return a != b;
  if (comparison == "LT") return a < b;
  if (comparison == "LE") return a <= b;
  if (comparison == "GT") return a > b;
  return a >= b;
}

Truth both(Truth a, Truth b, bool (*join)(bool, bool), std::optional<bool> decides) {
  if (decides && (a == decides || b == decides)) return decides;
  if (!a || !b) return std::nullopt;
  return join(*a, *b);
}

Truth joined(const Instruction& i, Truth a, Truth b) {
  if (i.has("AND"))
    return both(
        a, b, [](bool x, bool y) { return x && y; }, false);
  if (i.has("OR"))
    return both(
        a, b, [](bool x, bool y) { return x || y; }, true);
  return both(
      a, b, [](bool x, bool y) { return x != y; }, std::nullopt);
}

// The number of registers that an instruction may write from its first operand on, if it has no rule here.
int written_by(const Instruction& i) {
  const std::string_view base = i.base();
  if (base == "LDTM") return static_cast<int>(bytes_of(i)) / 128;
  if (base.ends_with("GMMA")) return columns_of(i) / 2;
  if (i.has("128") || base == "LDSM") return 4;
  if (base == "SHF" || base == "USHF") return 1;  // half of the 64 bits of two registers
  const bool wide = i.has("64") || i.has("WIDE") || base == "CS2R" || base.ends_with("2") || i.has("U64");
  return wide ? 2 : 1;
}

bool writes_nothing(std::string_view base) {
  constexpr std::string_view opcodes[] = {
      " ST STG STS STL STSM STTM RED REDG BAR DEPBAR WARPGROUP MEMBAR FENCE UTMALDG UTMASTG UTMAPF UTMACCTL ",
      " UTCHMMA UTCQMMA UTCBAR UTCCP UBLKCP UBLKRED UTMAREDG BRA EXIT NOP CCTL NANOSLEEP WARPSYNC BSYNC YIELD STAS "};
  const std::string padded = str_cat(" ", base, " ");
  return std::ranges::any_of(opcodes,
                             [&](std::string_view some) { return some.find(padded) != std::string_view::npos; });
}

}  // namespace

ValueAnalysis::Register ValueAnalysis::register_of(std::string_view operand) {
  while (!operand.empty() && (operand[0] == '-' || operand[0] == '~' || operand[0] == '|')) operand.remove_prefix(1);
  operand = operand.substr(0, operand.find_first_of(".|"));
  Register found{.uniform = operand.starts_with('U')};
  if (found.uniform) operand.remove_prefix(1);
  if (!operand.starts_with('R') || operand.size() < 2) return found;
  const auto [end, error] = std::from_chars(operand.data() + 1, operand.data() + operand.size(), found.number);
  if (error != std::errc() || end != operand.data() + operand.size() || found.number > 255) found.number = -1;
  return found;
}

Value ValueAnalysis::value(std::string_view operand) const {
  if (operand.starts_with('-') && operand.size() > 1 && (operand[1] == 'R' || operand[1] == 'U')) {
    const Value positive = value(operand.substr(1));
    return positive ? Value(0 - *positive) : std::nullopt;
  }
  if (operand.starts_with('~')) {
    const Value inverse = value(operand.substr(1));
    return inverse ? Value(~*inverse) : std::nullopt;
  }
  const std::string_view plain = operand.substr(0, operand.find('.'));
  if (plain == "RZ" || plain == "URZ" || plain == "SRZ") return 0;
  const Register r = register_of(operand);
  if (r.number >= 0) return (r.uniform ? uniform_ : registers_)[static_cast<size_t>(r.number)];
  return number_in(operand);
}

Value ValueAnalysis::address(std::string_view operand) const {
  const size_t open = operand.find('[');
  if (open == std::string_view::npos || !operand.ends_with(']')) return std::nullopt;
  operand = operand.substr(open + 1, operand.size() - open - 2);
  uint32_t sum = 0;
  while (!operand.empty()) {
    const size_t plus = std::min(operand.find('+'), operand.size());
    const Value part = value(operand.substr(0, plus));
    if (!part) return std::nullopt;
    sum += *part;
    operand.remove_prefix(std::min(plus + 1, operand.size()));
  }
  return sum;
}

Value ValueAnalysis::behind(std::string_view operand, int registers) const {
  const size_t open = operand.find('[');
  if (open == std::string_view::npos) return std::nullopt;
  const Register r = register_of(operand.substr(open + 1, operand.find_first_of("+]", open) - open - 1));
  if (r.number < 0) return std::nullopt;
  return (r.uniform ? uniform_ : registers_)[static_cast<size_t>(r.number + registers) & 255];
}

Truth ValueAnalysis::truth(std::string_view predicate) const {
  const bool inverse = predicate.starts_with('!');
  if (inverse) predicate.remove_prefix(1);
  const bool uniform = predicate.starts_with('U');
  if (uniform) predicate.remove_prefix(1);
  Truth found;
  if (predicate == "PT") found = true;
  if (predicate.size() == 2 && predicate[1] >= '0' && predicate[1] <= '7')
    found = (uniform ? uniform_predicates_ : predicates_)[static_cast<size_t>(predicate[1] - '0')];
  return found ? Truth(*found != inverse) : std::nullopt;
}

void ValueAnalysis::set(std::string_view operand, Value value, int behind) {
  const Register r = register_of(operand);
  if (r.number >= 0) (r.uniform ? uniform_ : registers_)[static_cast<size_t>(r.number + behind) & 255] = value;
}

void ValueAnalysis::set_predicate(std::string_view operand, Truth value) {
  const bool uniform = operand.starts_with('U');
  if (uniform) operand.remove_prefix(1);
  if (operand.size() == 2 && operand[0] == 'P' && operand[1] >= '0' && operand[1] <= '7')
    (uniform ? uniform_predicates_ : predicates_)[static_cast<size_t>(operand[1] - '0')] = value;
}

void ValueAnalysis::forget(const Instruction& i) {
  if (writes_nothing(i.base()) || i.operands.empty()) return;
  if (i.base() == "R2P") predicates_.fill(std::nullopt);
  size_t at = 0;
  for (; at < i.operands.size() && at < 2 && is_predicate(i.operands[at]); ++at) set_predicate(i.operands[at], {});
  if (at == i.operands.size()) return;
  for (int k = 0; k < written_by(i); ++k) set(i.operands[at], {}, k);
  for (++at; at < i.operands.size() && is_predicate(i.operands[at]) && at < 3; ++at) set_predicate(i.operands[at], {});
}

Value ValueAnalysis::special(std::string_view name) const {
  if (name == "SR_TID.X" || name == "SR_TID") return static_cast<uint32_t>(place_.thread);
  if (name == "SR_CgaCtaId" || name == "SR_CTAID.X") return static_cast<uint32_t>(place_.block);
  if (name == "SR_TID.Y" || name == "SR_TID.Z" || name == "SR_CTAID.Y" || name == "SR_CTAID.Z" || name == "SR_LANEID")
    return 0;
  return std::nullopt;
}

// "c[0x2][R4]": the target of an indirect branch. Other constants are kernel parameters.
Value ValueAnalysis::table(std::string_view operand) const {
  if (!operand.starts_with("c[0x2]")) return {};
  const Value at = address(operand.substr(6));
  if (!at || *at + 4 > kernel_.tables.size()) return {};
  uint32_t word = 0;
  for (size_t k = 0; k < 4; ++k) word |= uint32_t{kernel_.tables[*at + k]} << (8 * k);
  return word;
}

// from: the operands after the destination, without predicates.
Value ValueAnalysis::compute(const Instruction& i, const std::vector<std::string_view>& from) const {
  const std::string_view base = i.base()[0] == 'U' ? i.base().substr(1) : i.base();
  const auto at = [&](size_t k) { return k < from.size() ? value(from[k]) : Value(0); };
  const auto sum = [](std::initializer_list<Value> parts) {
    uint32_t total = 0;
    for (const Value& part : parts) {
      if (!part) return Value();
      total += *part;
    }
    return Value(total);
  };
  if (base == "MOV" || base == "R2UR" || base == "SHFL" || base == "CS2R") return at(0);
  if (base == "S2R" || base == "S2UR") return from.empty() ? Value() : special(from[0]);
  if (base == "IADD3" || base == "VIADD" || base == "IADD" || base == "IADD2" || base == "VIADD3")
    return i.has("X") ? Value() : sum({at(0), at(1), at(2)});
  if (base == "IMAD") {
    if (i.has("HI") || i.has("X")) return {};
    const Value a = at(0), b = at(1);
    const bool zero = (a && *a == 0) || (b && *b == 0);
    return sum({zero ? Value(0) : a && b ? Value(*a * *b) : Value(), at(2)});
  }
  if (base == "LEA") {
    const bool high = i.has("HI");
    const Value a = at(0), b = at(1), above = high ? at(2) : Value(0), by = at(high ? 3 : 2);
    if (i.has("X") || i.has("SX32") || !a || !b || !above || !by) return {};
    const uint64_t shifted_left = (uint64_t{*above} << 32 | *a) << (*by & 31);
    return static_cast<uint32_t>(high ? shifted_left >> 32 : shifted_left) + *b;
  }
  if (base == "SHF") return shifted(i, at(0), at(1), at(2));
  if (base == "SHL") return at(0) && at(1) ? Value(*at(0) << (*at(1) & 31)) : Value();
  if (base == "LOP3") {
    const Value table = at(3);
    Value a = at(0), b = at(1), c = at(2);
    if (!table) return {};
    if (*table == 0xc0 && ((a && *a == 0) || (b && *b == 0))) return 0;
    // Operands that do not affect the table may be unknown.
    const auto ignores = [&](uint32_t bit) {
      for (uint32_t k = 0; k < 8; ++k) {
        if ((*table >> k & 1) != (*table >> (k ^ bit) & 1)) return false;
      }
      return true;
    };
    if (!a && ignores(4)) a = 0;
    if (!b && ignores(2)) b = 0;
    if (!c && ignores(1)) c = 0;
    return a && b && c ? Value(look_up(*table, *a, *b, *c)) : Value();
  }
  if (base == "PRMT") {
    constexpr uint32_t low_half = 0x7610;  // half of operand 0; unused when the operand is a flag
    if (!at(0) || !at(1) || (!at(2) && *at(1) != low_half)) return {};
    return permuted(*at(0), *at(1), at(2).value_or(0));
  }
  if (base == "IABS") return at(0) ? Value(static_cast<uint32_t>(std::abs(static_cast<int32_t>(*at(0))))) : Value();
  if (base == "LDC") return from.empty() ? Value() : table(from[0]);
  if (base == "VIADDMNMX" || base == "VIMNMX" || base == "IMNMX") {
    const bool adds = base == "VIADDMNMX";
    const Value a = adds ? sum({at(0), at(1)}) : at(0), b = at(adds ? 2 : 1);
    const Truth least = truth(i.operands.back());
    if (!a || !b || !least || i.has("RELU")) return {};
    const bool less = i.has("U32") ? *a < *b : static_cast<int32_t>(*a) < static_cast<int32_t>(*b);
    return less == *least ? a : b;
  }
  if (base == "SEL") {
    const Truth which = truth(i.operands.back());
    if (which) return *which ? at(0) : at(1);
    constexpr uint32_t negates = 3u << 13;  // instruction descriptors negate no operand
    return at(0) && at(1) && ((*at(0) ^ *at(1)) & ~negates) == 0 ? Value(*at(0) & *at(1)) : Value();
  }
  return {};
}

// "ISETP.NE.AND P0, PT, R0, RZ, PT": a comparison, combined with a predicate. The second result combines the inverse.
void ValueAnalysis::compare(const Instruction& i) {
  if (i.operands.size() < 5 || i.has("EX")) return forget(i);
  const Value a = value(i.operands[2]), b = value(i.operands[3]);
  Truth result;
  if (a && b) {
    size_t dot = i.opcode.find('.');
    const std::string_view comparison = std::string_view(i.opcode).substr(dot + 1, 2);
    const bool is_unsigned = i.has("U32");
    const auto wide = [&](uint32_t v) { return is_unsigned ? int64_t{v} : int64_t{static_cast<int32_t>(v)}; };
    result = holds(comparison, wide(*a), wide(*b));
  }
  const Truth with = truth(i.operands[4]);
  set_predicate(i.operands[0], joined(i, result, with));
  set_predicate(i.operands[1], joined(i, result ? Truth(!*result) : result, with));
}

// Evaluates "PLOP3.LUT P0, PT, P1, P0, PT, 0xf8, 0x8f".
void ValueAnalysis::logic(const Instruction& i) {
  if (i.operands.size() < 7) return forget(i);
  const Truth in[] = {truth(i.operands[2]), truth(i.operands[3]), truth(i.operands[4])};
  for (const size_t result : {0, 1}) {
    const uint32_t table = number_in(i.operands[5 + result]).value_or(0);
    bool may_be[2] = {};
    for (uint32_t k = 0; k < 8; ++k) {
      const bool possible = (!in[0] || *in[0] == ((k & 4) != 0)) && (!in[1] || *in[1] == ((k & 2) != 0)) &&
                            (!in[2] || *in[2] == ((k & 1) != 0));
      if (possible) may_be[table >> k & 1] = true;
    }
    set_predicate(i.operands[result], may_be[0] && may_be[1] ? Truth() : Truth(may_be[1]));
  }
}

// "UIMAD.WIDE UR4, UR14, 0x55555556, URZ": a product in two registers. ptxas divides by constants this way.
void ValueAnalysis::multiply_wide(const Instruction& i) {
  const std::string& to = i.operands[0];
  const Value a = value(i.operands[1]), b = value(i.operands[2]);
  const bool plain = i.operands.size() == 4 && value(i.operands[3]) == 0u;
  forget(i);
  if (!a || !b || !plain) return;
  const uint64_t product = i.has("U32")
                               ? uint64_t{*a} * *b
                               : static_cast<uint64_t>(int64_t{static_cast<int32_t>(*a)} * static_cast<int32_t>(*b));
  set(to, static_cast<uint32_t>(product));
  set(to, static_cast<uint32_t>(product >> 32), 1);
}

// "STL [R1+0x34], R2", "LDL R2, [R1+0x34]": spilled registers.
void ValueAnalysis::access_stack(const Instruction& i) {
  if (i.base() == "STL") {
    stack_[i.first()] = i.has("64") || i.has("128") ? Value() : value(i.last());
    return;
  }
  const auto spilled = stack_.find(i.last());
  forget(i);
  if (spilled != stack_.end() && !i.has("64") && !i.has("128")) set(i.first(), spilled->second);
}

void ValueAnalysis::execute(const Instruction& i) {
  if (guard(i) == false) return;
  const std::string_view base = i.base();
  if ((base == "IMAD" || base == "UIMAD") && i.has("WIDE") && i.operands.size() >= 3) return multiply_wide(i);
  if (base == "ISETP" || base == "UISETP") return compare(i);
  if (base == "PLOP3" || base == "UPLOP3") return logic(i);
  if (base == "STL" || base == "LDL") return access_stack(i);
  // Assumptions: a tested barrier is complete, registers and tensor memory are available, and one lane is elected.
  if (base == "SYNCS" || base == "ELECT" || base == "USETMAXREG" || base == "UTCATOMSWS") {
    if (!i.operands.empty() && is_predicate(i.operands[0])) set_predicate(i.operands[0], true);
    return;
  }
  if ((base == "VOTE" || base == "VOTEU") && i.operands.size() == 2)
    return set_predicate(i.operands[0], truth(i.operands[1]));
  std::vector<std::string_view> plain;
  for (const std::string& operand : i.operands) {
    if (!is_predicate(operand)) plain.emplace_back(operand);
  }
  Value result;
  if (!plain.empty() && !writes_nothing(base)) result = compute(i, {plain.begin() + 1, plain.end()});
  // "LOP3.LUT P0, RZ, R26, 0xff, RZ, 0xc0, !PT": true if any bit is set.
  const bool asks = (base == "LOP3" || base == "ULOP3") && !i.operands.empty() && is_predicate(i.operands[0]);
  forget(i);
  if (asks && result) set_predicate(i.operands[0], *result != 0);
  if (plain.empty() || !result || i.has("64") || i.has("WIDE")) {
    const bool cleared = base == "CS2R" && result;
    for (int k = 0; cleared && k < 2; ++k) set(plain[0], result, k);
    if (base == "UMOV" || base == "MOV") set(plain[0], result);
    return;
  }
  set(plain[0], result);
  if (base == "CS2R" && !i.has("32")) set(plain[0], result, 1);
}

}  // namespace tandem::machine_code
