// Instructions that compute a value from values. Each is a row of a table, tested on thousands of operands.
//
//   form("add.s32 d, a, b;", [](int32_t a, int32_t b) { return int32_t(uint32_t(a) + uint32_t(b)); })
//
// The arguments of form() are the instruction's text and a function that computes the same on the CPU. The text writes
// d (and e, if the function returns a pair) and reads a, b, c and g. The types of the function follow the registers.
// bool is a predicate, other types have 16, 32 or 64 bits, and Half is a 16-bit number that is no integer.
#pragma once

#include <array>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "vgpu/tests/instructions/bench.h"

namespace tandem::test {

struct Half {
  uint16_t bits;
};
struct Pair {  // two of 16 bits, in a register of 32
  uint32_t bits;
};

// Kinds of operands, which determine the tested values.
enum class Operand : uint8_t { none, predicate, integer16, integer32, integer64, half, pair, f32, f64 };

using Values = std::array<uint64_t, 4>;   // types of the sources
using Results = std::array<uint64_t, 2>;  // types of d and e

template <class T>
T value_of(uint64_t bits) {
  T value;
  if constexpr (std::is_same_v<T, bool>)
    return bits != 0;
  else
    std::memcpy(&value, &bits, sizeof value);
  return value;
}
template <class T>
uint64_t bits_of(T value) {
  uint64_t bits = 0;
  std::memcpy(&bits, &value, sizeof value);
  return bits;
}

struct Form {
  std::string text;
  std::vector<Operand> to, from;
  std::function<Results(const Values&)> expected;
  // Accepts a result; empty: exactly the expected bits.
  std::function<bool(const Values&, uint64_t got, uint64_t want)> accepts;
  // Operands for which the result is undefined are skipped.
  std::function<bool(const Values&)> defined;
  std::vector<Values> only;  // values to try instead of all, in turns
  Needs needs = Needs::any;

  Form& on(Needs n) { return needs = n, *this; }
  // A float32 result may be this many units in the last place off.
  Form& within_ulps(double ulps);
  Form& within(std::function<bool(const Values&, uint64_t got, uint64_t want)> f) {
    return accepts = std::move(f), *this;
  }
  // f(a, b, ...) of the same types: true if the result is defined.
  template <class F>
  Form& where(F f);
  // Tests only this set of operands.
  template <class... T>
  Form& of(T... operands) {
    only = {Values{bits_of(operands)...}};
    return *this;
  }
  Form& of_each(std::vector<Values> sets) { return only = std::move(sets), *this; }
};

// Tests a family of forms on every device.
void try_all(const std::vector<Form>& forms);

// ---- Conversion of a function to a row ----
template <class T>
constexpr Operand operand_of() {
  if constexpr (std::is_same_v<T, bool>) return Operand::predicate;
  if constexpr (std::is_same_v<T, Half>) return Operand::half;
  if constexpr (std::is_same_v<T, Pair>) return Operand::pair;
  if constexpr (std::is_same_v<T, float>) return Operand::f32;
  if constexpr (std::is_same_v<T, double>) return Operand::f64;
  return sizeof(T) == 2 ? Operand::integer16 : sizeof(T) == 4 ? Operand::integer32 : Operand::integer64;
}

namespace detail {

template <class R>
struct Returned {
  static std::vector<Operand> operands() { return {operand_of<R>()}; }
  static Results results(const R& r) { return {bits_of(r), 0}; }
};
template <class R, class S>
struct Returned<std::pair<R, S>> {
  static std::vector<Operand> operands() { return {operand_of<R>(), operand_of<S>()}; }
  static Results results(const std::pair<R, S>& r) { return {bits_of(r.first), bits_of(r.second)}; }
};

template <class F>
struct Signature : Signature<decltype(&F::operator())> {};
template <class C, class R, class... A>
struct Signature<R (C::*)(A...) const> {
  template <class F>
  static auto call(const F& f, const Values& v) {
    return [&]<size_t... I>(std::index_sequence<I...>) {
      return f(value_of<A>(v[I])...);
    }(std::index_sequence_for<A...>());
  }
  template <class F>
  static Form form(std::string text, F f) {
    Form row;
    row.text = std::move(text);
    row.to = Returned<R>::operands();
    row.from = {operand_of<A>()...};
    row.expected = [f](const Values& v) { return Returned<R>::results(call(f, v)); };
    return row;
  }
};

}  // namespace detail

template <class F>
Form form(std::string text, F f) {
  return detail::Signature<F>::form(std::move(text), f);
}
template <class F>
Form& Form::where(F f) {
  defined = [f](const Values& v) { return detail::Signature<F>::call(f, v); };
  return *this;
}

}  // namespace tandem::test
