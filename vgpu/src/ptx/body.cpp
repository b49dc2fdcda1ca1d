#include <iterator>

#include "vgpu/src/ptx/reading.h"
#include "vgpu/src/ptx/words.h"

namespace tandem::vgpu::ptx {
namespace {

constexpr int kDeepest = 64;  // { } blocks within each other

class Body {
 public:
  Body(Reading& reading, int32_t first_symbol, Function* function)
      : reading_(reading),
        lexer_(reading.lexer),
        names_(reading.names),
        labels_(reading.labels),
        function_(*function),
        first_symbol_(first_symbol) {}

  void read() {
    const int32_t opened = lexer_.peek().line;
    lexer_.expect('{');
    open();
    while (blocks_ > 0) {
      if (lexer_.peek().kind == Token::Kind::end)
        refuse(opened, "the body that begins here must end with '}': add the brace");
      read_statement();
    }
    if (labels_.unresolved().empty()) return;
    const Labels::Use& use = labels_.unresolved()[0];
    const Instruction& branch = function_.instructions[use.instruction];
    const Operand& operand = branch.operands[use.operand];
    refuse(branch.location.ptx_line, quote((use.part < 0 ? operand : operand.parts[use.part]).text) +
                                         " must be a label of this block or of one around it: add the label");
  }

 private:
  void open() {
    if (++blocks_ > kDeepest) {
      refuse(lexer_.peek().line, "blocks must be nested at most 64 deep: move inner blocks out");
    }
    names_.open();
    labels_.open();
  }

  void close() {
    --blocks_;
    names_.close();
    labels_.close(function_.instructions);
  }

  void read_statement() {
    const Token& next = lexer_.peek();
    if (next.kind == Token::Kind::word) {
      const Token word = lexer_.take();
      if (lexer_.accept(':')) {
        read_label(word);
      } else {
        read_instruction(word);
      }
    } else if (next.kind == Token::Kind::dotted) {
      read_directive(lexer_.take());
    } else if (lexer_.accept('{')) {
      open();
    } else if (lexer_.accept('}')) {
      close();
    } else if (lexer_.accept('@')) {
      read_guarded();
    } else {
      lexer_.unexpected("an instruction, a label or a declaration");
    }
  }

  void read_directive(const Token& word) {
    if (word.text == "loc") return read_location();
    if (word.text == "reg") return read_registers(reading_);
    if (word.text == "pragma") {  // hints to an optimiser
      do lexer_.expect(Token::Kind::string, "a string");
      while (lexer_.accept(','));
      return lexer_.expect(';');
    }
    const Space space = variable_space(word.text);
    if (space == Space::generic) {
      refuse(word.line, quote(with_dot(word.text)) + " must be a directive of functions: remove the directive");
    }
    if (space == Space::global || space == Space::constant) {
      unsupported(word.line,
                  with_dot(word.text) + " variables must be declared outside of functions: move the declaration");
    }
    const VariableType type = read_variable_type(reading_, space);
    do declare(read_variable(reading_, type, false));
    while (lexer_.accept(','));
    lexer_.expect(';');
  }

  void declare(Variable variable) {
    declare(variable.name, Entity::Kind::symbol, first_symbol_ + static_cast<int32_t>(function_.symbols.size()));
    function_.symbols.push_back(std::move(variable.symbol));
  }

  void declare(const Token& name, Entity::Kind kind, int32_t index) {
    if (!names_.declare(name.text, kind, index)) {
      refuse(name.line, quote(name.text) + " must be declared once in a scope: rename one declaration");
    }
  }

  // ".loc 2 419 3, function_name $L__info_string0+4, inlined_at 1 4 3"
  void read_location() {
    location_.file = read_number("file of .loc");
    location_.line = read_number("line of .loc");
    read_number("column of .loc");
    while (lexer_.accept(',')) {
      const Token word = lexer_.expect(Token::Kind::word, "function_name or inlined_at");
      if (word.text == "function_name") {
        lexer_.expect(Token::Kind::word, "a label");
        read_offset(lexer_);
      } else if (word.text == "inlined_at") {
        for (int i = 0; i < 3; ++i) read_number("place of inlined_at");
      } else {
        refuse(word.line, "expected function_name or inlined_at, found " + quote(word.text));
      }
    }
  }

  int32_t read_number(const char* what) { return static_cast<int32_t>(read_count(lexer_, what, 0, INT32_MAX)); }

  void read_label(const Token& name) {
    const Token& next = lexer_.peek();
    if (next.is(Token::Kind::dotted, "branchtargets")) return read_targets(name, Entity::Kind::branch_targets);
    if (next.is(Token::Kind::dotted, "calltargets")) return read_targets(name, Entity::Kind::call_targets);
    if (next.is(Token::Kind::dotted, "callprototype")) return read_prototype(name);
    if (!labels_.place(names_.id(name.text), instruction_count())) {
      refuse(name.line, "label " + quote(name.text) + " must be placed once in a block: rename one label");
    }
  }

  // "$L_brx_0: .branchtargets $L__BB0_3, $L__BB0_4;"
  void read_targets(const Token& name, Entity::Kind kind) {
    lexer_.take();
    declare(name, kind, static_cast<int32_t>(targets_.size()));
    std::vector<std::string_view>& targets = targets_.emplace_back();
    do targets.push_back(lexer_.expect(Token::Kind::word, "a target").text);
    while (lexer_.accept(','));
    lexer_.expect(';');
  }

  // "prototype_0: .callprototype (.param .b32 _) _ (.param .b64 _);" is skipped, because the callee's parameters repeat
  // it.
  void read_prototype(const Token& name) {
    declare(name, Entity::Kind::prototype, 0);
    while (!lexer_.accept(';')) {
      if (lexer_.peek().kind == Token::Kind::end || lexer_.peek().is('}')) lexer_.unexpected("';'");
      lexer_.take();
    }
  }

  // Reads "@!%p1 bra L;" after the '@'.
  void read_guarded() {
    const bool negated = lexer_.accept('!');
    const Token name = lexer_.expect(Token::Kind::word, "a predicate register");
    const Entity guard = names_.find(name.text);
    if (guard.kind != Entity::Kind::reg || function_.registers[guard.index].type != Type::pred) {
      refuse(name.line,
             quote(name.text) + " guards an instruction and must be a predicate register: declare it as .pred");
    }
    Instruction& instruction = read_instruction(lexer_.expect(Token::Kind::word, "an instruction"));
    instruction.guard = guard.index;
    instruction.guard_negated = negated;
  }

  Instruction& read_instruction(const Token& opcode) {
    const bool known = is_opcode(opcode.text);
    Instruction& instruction = function_.instructions.emplace_back();
    instruction.opcode = opcode.text;
    instruction.location = location_;
    instruction.location.ptx_line = opcode.line;
    for (modifiers_.clear(); lexer_.peek().kind == Token::Kind::dotted;) modifiers_.push_back(lexer_.take().text);
    instruction.modifiers.assign(modifiers_.begin(), modifiers_.end());
    if (!known) {
      refuse(opcode.line, quote(instruction.full_name()) + " must be an instruction of PTX: correct the opcode");
    }
    if (opcode.text == "bra") {
      read_branch(instruction);
    } else if (opcode.text == "brx") {
      read_indexed_branch(instruction);
    } else if (opcode.text == "call") {
      read_call(instruction);
    } else if (!lexer_.peek().is(';')) {
      operands_.clear();
      do operands_.push_back(read_operand(reading_));
      while (lexer_.accept(','));
      instruction.operands.assign(std::move_iterator(operands_.begin()), std::move_iterator(operands_.end()));
    }
    if (!lexer_.accept(';')) lexer_.unexpected("',' or ';' after an operand of " + quote(instruction.full_name()));
    return instruction;
  }

  void read_branch(Instruction& instruction) {
    const Token label = lexer_.expect(Token::Kind::word, "a label");
    instruction.operands.push_back(named_operand(Operand::Kind::label, label.text));
    labels_.use({names_.id(label.text), instruction_count() - 1, 0, -1});
  }

  void read_indexed_branch(Instruction& instruction) {
    instruction.operands.push_back(read_operand(reading_));
    lexer_.expect(',');
    const Token list = lexer_.expect(Token::Kind::word, "a list of .branchtargets");
    const Entity entity = names_.find(list.text);
    if (entity.kind != Entity::Kind::branch_targets) {
      refuse(list.line, quote(list.text) + " must be a list of .branchtargets before this instruction: add one");
    }
    instruction.operands.push_back(vector_of_targets(Operand::Kind::label, entity, list.line));
    int32_t part = 0;
    for (const std::string_view label : targets_[entity.index]) {
      labels_.use({names_.id(label), instruction_count() - 1, 1, part++});
    }
  }

  // "call.uni (retval0), f, (param0, param1);" "call (retval0), %rd1, (param0), prototype_0;"
  void read_call(Instruction& instruction) {
    instruction.operands.reserve(4);
    const bool has_results = lexer_.peek().is('(');
    instruction.operands.push_back(read_list());
    if (has_results) lexer_.expect(',');
    const int32_t line = lexer_.peek().line;
    Operand callee = read_operand(reading_);
    const bool is_indirect = callee.kind == Operand::Kind::reg;
    if (!is_indirect && callee.kind != Operand::Kind::function) {
      refuse(line, "call: the callee must be a function: correct the name");
    }
    instruction.operands.push_back(std::move(callee));
    bool has_more = lexer_.accept(',');
    const bool has_arguments = has_more && lexer_.peek().is('(');
    instruction.operands.push_back(read_list());
    if (has_arguments) has_more = lexer_.accept(',');
    if (has_more != is_indirect) {
      refuse(line, is_indirect
                       ? "call: a prototype or a list of .calltargets must follow a callee in a register: add one"
                       : "call: nothing must follow the arguments of a named function: remove the last operand");
    }
    if (is_indirect) instruction.operands.push_back(read_callees());
  }

  Operand read_callees() {
    const Token name = lexer_.expect(Token::Kind::word, "a prototype or a list of .calltargets");
    const Entity entity = names_.find(name.text);
    if (entity.kind == Entity::Kind::prototype) return named_operand(Operand::Kind::string, name.text);
    if (entity.kind != Entity::Kind::call_targets) {
      refuse(name.line, quote(name.text) + " must be a prototype or a list of .calltargets before this call: add one");
    }
    for (const std::string_view callee : targets_[entity.index]) {
      if (names_.find(callee).kind == Entity::Kind::function) continue;
      refuse(name.line, quote(callee) + " of " + quote(name.text) + " must be a function: correct the list");
    }
    return vector_of_targets(Operand::Kind::function, entity, name.line);
  }

  // Reads "(a, b)", "()" or nothing.
  Operand read_list() {
    Operand list;
    list.kind = Operand::Kind::vector;
    if (!lexer_.accept('(') || lexer_.accept(')')) return list;
    do list.parts.push_back(read_operand(reading_));
    while (lexer_.accept(','));
    lexer_.expect(')');
    return list;
  }

  Operand vector_of_targets(Operand::Kind kind, const Entity& entity, int32_t line) {
    Operand vector;
    vector.kind = Operand::Kind::vector;
    for (const std::string_view target : targets_[entity.index]) {
      reading_.budget.spend(line, static_cast<int64_t>(sizeof(Operand) + target.size()), "lists of targets");
      vector.parts.push_back(named_operand(kind, target));
    }
    return vector;
  }

  static Operand named_operand(Operand::Kind kind, std::string_view name) {
    Operand named;
    named.kind = kind;
    named.text = name;
    return named;
  }

  int32_t instruction_count() const { return static_cast<int32_t>(function_.instructions.size()); }

  Reading& reading_;
  Lexer& lexer_;
  Names& names_;
  Labels& labels_;
  Function& function_;
  const int32_t first_symbol_;
  std::vector<std::vector<std::string_view>> targets_;
  Location location_;
  std::vector<std::string_view> modifiers_;  // the instruction being read; reused for speed
  std::vector<Operand> operands_;
  int blocks_ = 0;
};

}  // namespace

void read_body(Reading& reading, int32_t first_symbol, Function* function) {
  Body(reading, first_symbol, function).read();
}

}  // namespace tandem::vgpu::ptx
