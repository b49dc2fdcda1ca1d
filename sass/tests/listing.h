// Builds text in the format of nvdisasm from lines of code.
#pragma once

#include <cstdio>
#include <string>
#include <vector>

#include "sass/src/sass.h"

namespace tandem::machine_code {

// A label ends with ':'. Every other line is an instruction.
using Lines = std::vector<std::string>;

inline Lines operator+(Lines a, const Lines& b) {
  a.insert(a.end(), b.begin(), b.end());
  return a;
}
inline Lines times(int count, const Lines& lines) {
  Lines all;
  for (int i = 0; i < count; ++i) all = all + lines;
  return all;
}

inline std::string code_section(const std::string& kernel, const Lines& lines) {
  std::string text =
      "\t.section\t.text." + kernel + ",\"ax\",@progbits\n\t.sectionflags\t@\"\"\n.text." + kernel + ":\n";
  unsigned address = 0;
  for (const std::string& line : lines) {
    char start[32];
    std::snprintf(start, sizeof start, "        /*%04x*/ ", address);
    if (line.ends_with(':')) {
      text += line + "\n";
    } else {
      text += start + std::string("                  ") + line + " ;\n";
      address += 16;
    }
  }
  return text;
}

inline std::string listing(const std::string& arch, const Lines& lines) {
  return "\t.target\t" + arch + "\n" + code_section("forward", lines);
}

inline std::vector<Instruction> code_of(const Lines& lines) {
  Cubin cubin;
  const Status status = parse(listing("sm_90a", lines), &cubin);
  return status.ok() ? cubin.kernels[0].code : std::vector<Instruction>{};
}

}  // namespace tandem::machine_code
