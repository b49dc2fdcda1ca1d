#include "sass/src/sass.h"

#include <algorithm>
#include <charconv>
#include <map>

#include "base/text.h"

namespace tandem::machine_code {
namespace {

std::string_view trimmed(std::string_view text) {
  constexpr std::string_view space = " \t\r";
  const size_t begin = text.find_first_not_of(space);
  if (begin == std::string_view::npos) return {};
  return text.substr(begin, text.find_last_not_of(space) + 1 - begin);
}

// Removes and returns the part before the separator, or all of the text if there is no separator.
std::string_view split_off(std::string_view* text, std::string_view separator) {
  const size_t at = std::min(text->find(separator), text->size());
  const std::string_view part = text->substr(0, at);
  text->remove_prefix(std::min(at + separator.size(), text->size()));
  return part;
}

bool take(std::string_view* text, std::string_view prefix) {
  if (!text->starts_with(prefix)) return false;
  text->remove_prefix(prefix.size());
  return true;
}

template <class Number>
bool number(std::string_view text, int base, Number* value) {
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), *value, base);
  return error == std::errc() && end == text.data() + text.size();
}

// Splits "R4, c[0x0][R2, 0x4], `(.L_x_1)". Commas within brackets do not separate operands.
std::vector<std::string> operands_of(std::string_view text) {
  std::vector<std::string> operands;
  int depth = 0;
  size_t begin = 0;
  for (size_t i = 0; i <= text.size(); ++i) {
    if (i < text.size() && (text[i] == '[' || text[i] == '(')) ++depth;
    if (i < text.size() && (text[i] == ']' || text[i] == ')')) --depth;
    if (i < text.size() && (text[i] != ',' || depth > 0)) continue;
    if (const std::string_view operand = trimmed(text.substr(begin, i - begin)); !operand.empty())
      operands.emplace_back(operand);
    begin = i + 1;
  }
  return operands;
}

// Returns the labels that a branch names: "`(.L_x_1)", or (*"BRANCH_TARGETS .L_x_1,.L_x_2"*) for an indirect branch.
std::vector<std::string> labels_of(std::string_view text) {
  std::vector<std::string> labels;
  if (const size_t at = text.find("BRANCH_TARGETS "); at != std::string_view::npos) {
    std::string_view list = text.substr(at + 15);
    list = list.substr(0, list.find('"'));
    while (!list.empty()) labels.emplace_back(trimmed(split_off(&list, ",")));
    return labels;
  }
  if (const size_t at = text.find("`("); at != std::string_view::npos) {
    const std::string_view rest = text.substr(at + 2);
    labels.emplace_back(rest.substr(0, rest.find(')')));
  }
  return labels;
}

class Reader {
 public:
  Status read(std::string_view text, Cubin* cubin) {
    while (!text.empty()) line(split_off(&text, "\n"));
    TANDEM_TRY(resolve());
    cubin->arch = std::move(arch_);
    for (auto& [name, kernel] : kernels_) {
      if (!kernel.code.empty()) cubin->kernels.push_back(std::move(kernel));
    }
    if (cubin->kernels.empty())
      return Status::invalid("the output of nvdisasm has no machine code: pass a cubin with kernels");
    return {};
  }

 private:
  struct Branch {
    Kernel* kernel;
    size_t instruction;
    std::string label;
  };

  void line(std::string_view text) {
    text = trimmed(text);
    if (take(&text, "//----- nvinfo : ")) {
      attribute_ = text;
      words_.clear();
    } else if (take(&text, ".target")) {
      arch_ = trimmed(split_off(&text, ","));
    } else if (take(&text, ".section\t") || take(&text, ".section ")) {
      section(trimmed(split_off(&text, ",")));
    } else if (text.starts_with("/*")) {
      const std::string_view address = trimmed(split_off(&text, "*/").substr(2));
      text = trimmed(text);
      if (in_code_ && address.starts_with("0x")) return encoding(address.substr(2));
      if (tables_ != nullptr) return table(text);
      if (!take(&text, ".word") && in_code_) return instruction(address, text);
      if (in_info_) word(trimmed(text));
    } else if (take(&text, ".zero") && shared_ != nullptr) {
      uint32_t bytes = 0;
      if (number(trimmed(text), 10, &bytes)) shared_->shared_bytes += static_cast<int>(bytes);
    } else if (in_code_ && text.ends_with(':')) {
      labels_[std::string(text.substr(0, text.size() - 1))] = kernel_->code.size();
    }
  }

  void section(std::string_view name) {
    in_code_ = in_info_ = false;
    shared_ = tables_ = nullptr;
    if (take(&name, ".text.")) {
      in_code_ = true;
      kernel_ = &kernel(name);
    } else if (take(&name, ".nv.info")) {
      in_info_ = true;
      of_one_ = take(&name, ".");
      kernel_ = of_one_ ? &kernel(name) : nullptr;
    } else if (take(&name, ".nv.shared.") && !name.starts_with("reserved")) {
      shared_ = &kernel(name);
    } else if (take(&name, ".nv.constant2.")) {
      tables_ = &kernel(name);
    }
  }

  // Reads ".byte 0x90, 0x32, 0x00, 0x00".
  void table(std::string_view text) {
    if (!take(&text, ".byte")) return;
    while (!text.empty()) {
      std::string_view digits = trimmed(split_off(&text, ","));
      uint32_t value = 0;
      if (take(&digits, "0x") && number(digits, 16, &value)) tables_->tables.push_back(static_cast<uint8_t>(value));
    }
  }

  Kernel& kernel(std::string_view name) {
    Kernel& found = kernels_[std::string(name)];
    found.name = name;
    return found;
  }

  // Attributes for all kernels are pairs of words: a kernel and a number. Attributes for one kernel are numbers.
  void word(std::string_view text) {
    if (take(&text, "index@(")) {
      if (!of_one_) kernel_ = &kernel(text.substr(0, text.find(')')));
      return;
    }
    uint32_t value = 0;
    if (kernel_ == nullptr || !take(&text, "0x") || !number(text, 16, &value)) return;
    words_.push_back(value);
    const auto last = static_cast<int>(value);
    if (attribute_ == "EIATTR_REGCOUNT") kernel_->registers = last;
    if (attribute_ == "EIATTR_MIN_STACK_SIZE") kernel_->stack_bytes = last;
    if ((attribute_ == "EIATTR_REQNTID" || attribute_ == "EIATTR_MAX_THREADS") && words_.size() == 3)
      kernel_->threads = static_cast<int>(words_[0] * words_[1] * words_[2]);
  }

  // The second word of an encoding is on the line below its instruction.
  void encoding(std::string_view digits) {
    uint64_t word = 0;
    if (!kernel_->code.empty() && number(digits, 16, &word)) kernel_->code.back().control = control_of(word);
  }

  // Reads "@!P0 BRA P1, `(.L_x_0) ;".
  void instruction(std::string_view address, std::string_view text) {
    Instruction made;
    if (!number(address, 16, &made.address)) return;
    std::string_view body = trimmed(split_off(&text, ";"));
    if (take(&body, "@")) {
      made.guard = split_off(&body, " ");
      if (made.guard == "PT" || made.guard == "UPT") made.guard.clear();
      body = trimmed(body);
    }
    made.opcode = split_off(&body, " ");
    for (std::string& label : labels_of(body)) branches_.push_back({kernel_, kernel_->code.size(), std::move(label)});
    made.operands = operands_of(body.substr(0, body.find("(*")));
    kernel_->code.push_back(std::move(made));
  }

  Status resolve() {
    for (const Branch& branch : branches_) {
      Instruction& from = branch.kernel->code[branch.instruction];
      if (from.base() == "CALL" || from.base() == "RET") continue;  // calls return to the instruction after the call
      const auto found = labels_.find(branch.label);
      if (found != labels_.end() && found->second < branch.kernel->code.size()) {
        from.targets.push_back(static_cast<int32_t>(found->second));
      } else if (from.base().starts_with("BR") || from.base().starts_with("J")) {
        return Status::invalid(str_cat("the code of ", branch.kernel->name, " branches to ", branch.label,
                                       ", which nvdisasm did not print: install a newer nvdisasm"));
      }
    }
    return {};
  }

  std::string arch_;
  std::map<std::string, Kernel> kernels_;
  std::map<std::string, size_t> labels_;  // unique in a file
  std::vector<Branch> branches_;

  // The current position in the text.
  bool in_code_ = false, in_info_ = false, of_one_ = false;
  Kernel* kernel_ = nullptr;
  Kernel* shared_ = nullptr;
  Kernel* tables_ = nullptr;
  std::string attribute_;
  std::vector<uint32_t> words_;
};

}  // namespace

Control control_of(uint64_t second_word) {
  const auto bits = static_cast<uint32_t>(second_word >> 41);
  const auto barrier = [](uint32_t number) { return number == 7 ? -1 : static_cast<int>(number); };
  return {.stall = static_cast<int>(bits & 15),
          .yields = (bits >> 4 & 1) == 0,
          .write_barrier = barrier(bits >> 5 & 7),
          .read_barrier = barrier(bits >> 8 & 7),
          .waits = bits >> 11 & 63};
}

bool Instruction::has(std::string_view modifier) const {
  std::string_view rest = opcode;
  split_off(&rest, ".");
  while (!rest.empty()) {
    if (split_off(&rest, ".") == modifier) return true;
  }
  return false;
}

Status parse(std::string_view text, Cubin* cubin) { return Reader().read(text, cubin); }

}  // namespace tandem::machine_code
