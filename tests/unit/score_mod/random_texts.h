// Random expressions over the names of texts.h.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <random>
#include <string>

namespace tandem::score_mod::test {

class Writer {
 public:
  explicit Writer(uint64_t seed) : random_(seed) {}

  std::string real(int depth) {
    if (depth == 0) return pick({"score", "c", "0.75", "-1.5", "temperature", "slope[head]", "0.0", "inf"});
    switch (random_() % 9) {
      case 0:
        return call(pick({"exp", "exp2", "log", "log2", "expm1", "log1p", "sin", "cos", "erf", "tanh", "sigmoid",
                          "sqrt", "abs", "floor", "round", "sign", "-"}),
                    real(depth - 1));
      case 1: return "(" + real(depth - 1) + pick({" / ", " // ", " % "}) + real(depth - 1) + ")";
      case 2: return pick({"min", "max"}) + "(" + real(depth - 1) + ", " + real(depth - 1) + ")";
      case 3: return "clamp(" + real(depth - 1) + ", -0.8, " + real(depth - 1) + ")";  // torch differs for equal bounds
      case 4: return "(" + real(depth - 1) + " if " + boolean(depth - 1) + " else " + real(depth - 1) + ")";
      case 5: return "table[" + integer(depth - 1) + ", " + integer(depth - 1) + "]";
      case 6: return "float(" + integer(depth - 1) + ")";
      default: return "(" + real(depth - 1) + pick({" + ", " - ", " * "}) + real(depth - 1) + ")";
    }
  }
  std::string integer(int depth) {
    if (depth == 0) return pick({"q", "k", "n", "head", "batch", "seqlen_k", "3", "-1", "0x80000000", "doc[batch, q]"});
    switch (random_() % 5) {
      case 0: return call(pick({"abs", "~", "-", "sign"}), integer(depth - 1));
      case 1: return "int(" + real(depth - 1) + ")";
      case 2: return "select(" + boolean(depth - 1) + ", " + integer(depth - 1) + ", " + integer(depth - 1) + ")";
      default:
        return "(" + integer(depth - 1) +
               pick({" + ", " - ", " * ", " // ", " % ", " & ", " | ", " ^ ", " << ", " >> "}) + integer(depth - 1) +
               ")";
    }
  }
  std::string boolean(int depth) {
    if (depth == 0) return pick({"on", "seen[k]", "k <= q", "true"});
    switch (random_() % 4) {
      case 0: return "(not " + boolean(depth - 1) + ")";
      case 1: return "(" + boolean(depth - 1) + pick({" and ", " or ", " ^ ", " == "}) + boolean(depth - 1) + ")";
      case 2: return "(" + integer(depth - 1) + pick({" < ", " >= ", " == ", " != "}) + integer(depth - 1) + ")";
      default: return "(" + real(depth - 1) + pick({" < ", " >= ", " <= "}) + real(depth - 1) + ")";
    }
  }

 private:
  std::string pick(std::initializer_list<const char*> of) { return of.begin()[random_() % of.size()]; }
  static std::string call(const std::string& name, const std::string& of) { return name + "(" + of + ")"; }
  std::mt19937_64 random_;
};

}  // namespace tandem::score_mod::test
