#include "vgpu/src/ptx/parser.h"

#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "vgpu/src/ptx/inlining.h"
#include "vgpu/src/ptx/reading.h"

namespace tandem::vgpu::ptx {
namespace {

constexpr size_t kMaxText = size_t{1} << 30;  // lines and instructions are counted with 32 bits

class ModuleReader {
 public:
  explicit ModuleReader(std::string_view text) : reading_(text), lexer_(reading_.lexer), names_(reading_.names) {}

  Module read() {
    read_preamble();
    while (lexer_.peek().kind != Token::Kind::end) read_directive();
    name_files();
    follow_aliases();
    share_variables();
    return std::move(module_);
  }

 private:
  void read_preamble() {
    if (!lexer_.accept("version")) lexer_.unexpected("'.version', with which PTX begins");
    const Token version = lexer_.expect(Token::Kind::number, "a version");
    const size_t dot = std::min(version.text.find('.'), version.text.size());
    module_.version_major = version_part(version, version.text.substr(0, dot));
    module_.version_minor = version_part(version, version.text.substr(std::min(dot + 1, version.text.size())));
    if (!lexer_.accept("target")) lexer_.unexpected("'.target'");
    module_.target = lexer_.expect(Token::Kind::word, "a target like sm_90a").text;
    if (!module_.target.starts_with("sm_")) {
      refuse(version.line, quote(module_.target) + " must be a target like sm_90a: name the architecture of a GPU");
    }
    while (lexer_.accept(',')) {
      const Token option = lexer_.expect(Token::Kind::word, "an option of .target");
      if (option.text == "map_f64_to_f32") {
        unsupported(option.line, "'map_f64_to_f32' is not supported: remove the option");
      }
    }
  }

  static int version_part(const Token& version, std::string_view digits) {
    int value = 0;
    for (const char c : digits) value = c >= '0' && c <= '9' && digits.size() < 4 ? value * 10 + (c - '0') : -1;
    if (digits.empty() || value < 0) {
      refuse(version.line, quote(version.text) + " must be a version like 9.0: write two numbers");
    }
    return value;
  }

  void read_directive() {
    const Token word = lexer_.expect(Token::Kind::dotted, "a directive");
    if (word.text == "visible" || word.text == "weak" || word.text == "common" || word.text == "extern") {
      is_extern_ |= word.text == "extern";
      return;  // attributes of the next declaration
    }
    const bool is_extern = std::exchange(is_extern_, false);
    if (word.text == "entry") return read_function(true);
    if (word.text == "func") return read_function(false);
    if (word.text == "address_size") return read_address_size();
    if (word.text == "file") return read_file();
    if (word.text == "section") return skip_section();
    if (word.text == "alias") return read_alias();
    if (word.text == "pragma") return skip_pragma();
    if (word.text == "reg")
      unsupported(word.line, "registers of a module are not supported: declare the registers in a function");
    const Space space = variable_space(word.text);
    if (space == Space::generic || space == Space::param || space == Space::local) {
      refuse(word.line, quote(with_dot(word.text)) + " must be a directive of modules: remove the directive");
    }
    const VariableType type = read_variable_type(reading_, space);
    do declare(read_variable(reading_, type, is_extern));
    while (lexer_.accept(','));
    lexer_.expect(';');
  }

  void read_address_size() {
    const int32_t line = lexer_.peek().line;
    if (read_count(lexer_, "address size", 32, 64) != 64) {
      unsupported(line, "addresses of 32 bits are not supported: compile for 64 bits");
    }
  }

  // ".file 1 "name", 1700000000, 4096"
  void read_file() {
    const auto number = read_count(lexer_, "number of .file", 0, INT32_MAX);
    const Token name = lexer_.expect(Token::Kind::string, "the name of a file");
    const auto index = static_cast<int32_t>(module_.files.size());
    if (file_index_.try_emplace(static_cast<int32_t>(number), index).second) module_.files.emplace_back(name.text);
    while (lexer_.accept(',')) read_constant(lexer_);
  }

  void skip_section() {  // debug information
    lexer_.expect(Token::Kind::dotted, "the name of a section");
    lexer_.expect('{');
    lexer_.skip_block();
  }

  void skip_pragma() {  // hints to an optimiser
    do lexer_.expect(Token::Kind::string, "a string");
    while (lexer_.accept(','));
    lexer_.expect(';');
  }

  void read_alias() {
    const Token alias = lexer_.expect(Token::Kind::word, "the name of a function");
    lexer_.expect(',');
    const Token target = lexer_.expect(Token::Kind::word, "the name of a function");
    lexer_.expect(';');
    for (const Token& name : {alias, target}) {
      if (names_.find(name.text).kind != Entity::Kind::function) {
        refuse(name.line,
               ".alias: " + quote(name.text) + " must be a function that is declared before: add the declaration");
      }
    }
    if (module_.functions[names_.find(alias.text).index].has_body ||
        !aliases_.emplace(alias.text, target.text).second) {
      refuse(alias.line,
             ".alias: " + quote(alias.text) + " must have neither a body nor another alias: rename the alias");
    }
  }

  // A variable may be declared again if it was .extern.
  void declare(Variable variable) {
    const Token& name = variable.name;
    for (const AddressValue& value : variable.symbol.addresses) {
      const Symbol& of = module_.variables[value.variable];
      if (of.space == Space::shared) {
        unsupported(name.line, "an initial value of " + quote(name.text) + " is the address of " + quote(of.name) +
                                   ", which is in .shared memory: compute the address in the kernel");
      }
    }
    if (names_.declare(name.text, Entity::Kind::symbol, static_cast<int32_t>(module_.variables.size()))) {
      module_.variables.push_back(std::move(variable.symbol));
      return;
    }
    const Entity known = names_.find(name.text);
    if (known.kind != Entity::Kind::symbol) {
      refuse(name.line, quote(name.text) + " must be declared once: rename one declaration");
    }
    Symbol& before = module_.variables[known.index];
    const bool same = before.space == variable.symbol.space && before.type == variable.symbol.type;
    if (!same || (!before.is_extern && !variable.symbol.is_extern))
      refuse(name.line, quote(name.text) + " must be declared once: rename one declaration");
    if (before.is_extern) before = std::move(variable.symbol);
  }

  void read_function(bool is_entry);
  void read_parameters(Function& function, std::vector<int32_t>* parameters, std::vector<Token>* names);
  void read_function_directives(Function& function);
  void read_dimensions(int32_t (&dimensions)[3]);
  int32_t read_positive(const char* what) { return static_cast<int32_t>(read_count(lexer_, what, 1, INT32_MAX)); }
  int32_t place_of_function(const Token& name, bool is_entry);
  int32_t variable_count() const { return static_cast<int32_t>(module_.variables.size()); }

  void name_files();
  void follow_aliases();
  void share_variables();

  Reading reading_;
  Lexer& lexer_;
  Names& names_;
  Module module_;
  bool is_extern_ = false;
  std::vector<int32_t> first_symbols_;               // by function: the module's variables before it
  std::unordered_map<int32_t, int32_t> file_index_;  // number of .file -> index of files
  std::unordered_map<std::string, std::string> aliases_;
};

void ModuleReader::read_function(bool is_entry) {
  Function function;
  function.is_entry = is_entry;
  std::vector<Token> symbol_names;
  if (!is_entry && lexer_.peek().is('(')) read_parameters(function, &function.results, &symbol_names);
  const Token name = lexer_.expect(Token::Kind::word, "the name of a function");
  function.name = name.text;
  if (lexer_.peek().is('(')) read_parameters(function, &function.parameters, &symbol_names);
  read_function_directives(function);
  const int32_t index = place_of_function(name, is_entry);
  if (!lexer_.peek().is('{')) {
    lexer_.expect(';');
    if (module_.functions[index].has_body) return;
  } else {
    if (module_.functions[index].has_body) {
      refuse(name.line, "function " + quote(name.text) + " must be defined once: rename one function");
    }
    function.has_body = true;
    names_.open();
    names_.number_registers(&function.registers);
    for (const Token& symbol : symbol_names) {
      const auto i = static_cast<int32_t>(&symbol - symbol_names.data());
      if (names_.declare(symbol.text, Entity::Kind::symbol, variable_count() + i)) continue;
      refuse(symbol.line, quote(symbol.text) + " must be declared once in a scope: rename one declaration");
    }
    read_body(reading_, variable_count(), &function);
    names_.close();
  }
  first_symbols_[index] = variable_count();
  module_.functions[index] = std::move(function);
}

// Returns the index of the function in the module, which an earlier prototype may have defined.
int32_t ModuleReader::place_of_function(const Token& name, bool is_entry) {
  const auto next = static_cast<int32_t>(module_.functions.size());
  if (names_.declare(name.text, Entity::Kind::function, next)) {
    Function& function = module_.functions.emplace_back();
    function.is_entry = is_entry;
    first_symbols_.push_back(0);
    return next;
  }
  const Entity known = names_.find(name.text);
  if (known.kind != Entity::Kind::function || module_.functions[known.index].is_entry != is_entry) {
    refuse(name.line, quote(name.text) + " must be declared once: rename one declaration");
  }
  return known.index;
}

// "(.param .b64 a, .param .align 64 .b8 b[128])"
void ModuleReader::read_parameters(Function& function, std::vector<int32_t>* parameters, std::vector<Token>* names) {
  lexer_.expect('(');
  if (lexer_.accept(')')) return;
  do {
    const Token space = lexer_.expect(Token::Kind::dotted, "'.param'");
    if (space.text == "reg") unsupported(space.line, "parameters in registers (.reg) are not supported: use .param");
    if (space.text != "param") refuse(space.line, "expected '.param', found " + quote(with_dot(space.text)));
    Variable variable = read_variable(reading_, read_variable_type(reading_, Space::param), false);
    parameters->push_back(variable_count() + static_cast<int32_t>(function.symbols.size()));
    function.symbols.push_back(std::move(variable.symbol));
    names->push_back(variable.name);
  } while (lexer_.accept(','));
  lexer_.expect(')');
}

// ".maxntid 384, 1, 1 .minnctapersm 1"
void ModuleReader::read_function_directives(Function& function) {
  while (lexer_.peek().kind == Token::Kind::dotted) {
    const Token word = lexer_.take();
    if (word.text == "maxntid") {
      read_dimensions(function.max_threads);
    } else if (word.text == "reqntid") {
      read_dimensions(function.required_threads);
    } else if (word.text == "reqnctapercluster") {
      read_dimensions(function.required_cluster);
    } else if (word.text == "minnctapersm") {
      function.min_ctas = read_positive("blocks of .minnctapersm");
    } else if (word.text == "maxnreg") {
      function.max_registers = read_positive("registers of .maxnreg");
    } else if (word.text == "maxclusterrank") {
      function.max_cluster_rank = read_positive("blocks of .maxclusterrank");
    } else if (word.text == "explicitcluster") {
      function.explicit_cluster = true;
    } else if (word.text == "blocksareclusters") {
      function.blocks_are_clusters = true;
    } else if (word.text == "pragma") {
      skip_pragma();
    } else if (word.text == "maxnctapersm" || word.text == "abi_preserve" || word.text == "abi_preserve_control") {
      read_count(lexer_, "number of this directive", 0, INT32_MAX);  // for the compiler of the machine's code alone
    } else if (word.text != "noreturn") {
      refuse(word.line, quote(with_dot(word.text)) + " must be a directive of a function: remove the directive");
    }
  }
}

// Reads "384, 1, 1". Omitted dimensions are 1.
void ModuleReader::read_dimensions(int32_t (&dimensions)[3]) {
  for (int32_t& n : dimensions) n = 1;
  dimensions[0] = read_positive("the first dimension");
  for (int i = 1; i < 3 && lexer_.accept(','); ++i) dimensions[i] = read_positive("a dimension");
}

void ModuleReader::name_files() {
  for (Function& function : module_.functions) {
    for (Instruction& instruction : function.instructions) {
      const auto file = file_index_.find(instruction.location.file);
      instruction.location.file = file == file_index_.end() ? -1 : file->second;
    }
  }
}

// Replaces aliases by the functions' names.
void ModuleReader::follow_aliases() {
  const auto follow = [&](auto& self, std::vector<Operand>& operands) -> void {
    for (Operand& operand : operands) {
      self(self, operand.parts);
      if (operand.kind != Operand::Kind::function) continue;
      const auto alias = aliases_.find(operand.text);
      if (alias != aliases_.end()) operand.text = alias->second;
    }
  };
  if (aliases_.empty()) return;
  for (Function& function : module_.functions) {
    for (Instruction& instruction : function.instructions) follow(follow, instruction.operands);
  }
}

// Puts the module's variables before each function's variables.
void ModuleReader::share_variables() {
  int64_t bytes = 0;
  for (const Symbol& v : module_.variables) bytes += static_cast<int64_t>(sizeof v + v.name.size() + v.initial.size());
  const auto renumber = [](auto& self, std::vector<Operand>& operands, int32_t first, int32_t by) -> void {
    for (Operand& operand : operands) {
      if (operand.symbol >= first) operand.symbol += by;
      self(self, operand.parts, first, by);
    }
  };
  for (size_t i = 0; i < module_.functions.size(); ++i) {
    Function& function = module_.functions[i];
    reading_.budget.spend(lexer_.peek().line, bytes, "variables and functions");
    const int32_t first = first_symbols_[i], late = variable_count() - first;
    for (int32_t& symbol : function.parameters) symbol += late;
    for (int32_t& symbol : function.results) symbol += late;
    if (late > 0) {
      for (Instruction& instruction : function.instructions) renumber(renumber, instruction.operands, first, late);
    }
    function.symbols.insert(function.symbols.begin(), module_.variables.begin(), module_.variables.end());
  }
}

}  // namespace

Status parse(std::string_view text, Module* module) {
  while (text.ends_with('\0')) text.remove_suffix(1);  // NVRTC's text has its terminator
  if (text.size() > kMaxText) return Status::unsupported("PTX text must be at most 1 GiB: split the module");
  try {
    *module = ModuleReader(text).read();
    read_inlining(text, module);
    return {};
  } catch (const Refusal& refusal) {
    return refusal.status;
  }
}

}  // namespace tandem::vgpu::ptx
