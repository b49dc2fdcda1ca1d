#include <bit>
#include <cstring>

#include "vgpu/src/ptx/reading.h"

namespace tandem::vgpu::ptx {
namespace {

constexpr int64_t kMaxBytes = int64_t{1} << 32;  // limit for a variable
constexpr int64_t kMaxAlignment = 1 << 20;
constexpr int64_t kMaxRegisters = 1 << 24;  // limit for one %r<N>
constexpr size_t kMaxDimensions = 16;

// The values of an array, row by row: {{1, 2}, {3, 4}}. Omitted values are zero.
class InitialValues {
 public:
  // dimensions: the first may be 0; it then equals the number of values.
  InitialValues(Reading& reading, const std::vector<int64_t>& dimensions, Symbol* symbol)
      : reading_(reading), lexer_(reading.lexer), dimensions_(dimensions), symbol_(symbol) {}

  // The number of rows.
  int64_t read() {
    if (dimensions_.empty()) {
      put(0);
      return 1;
    }
    return read_row(0, 0);
  }

 private:
  // Reads elements from `first` on, of the remaining dimensions.
  int64_t read_row(size_t dimension, int64_t first) {
    const int32_t line = lexer_.peek().line;
    lexer_.expect('{');
    int64_t stride = 1, index = 0;
    for (size_t i = dimension + 1; i < dimensions_.size(); ++i) stride *= dimensions_[i];
    const bool is_open = dimension == 0 && dimensions_[0] == 0;
    do {
      if (!is_open && index == dimensions_[dimension]) {
        refuse(line, quote(symbol_->name) + " must not have more initial values than elements: enlarge the array");
      }
      const int64_t at = first + index * stride;
      if (dimension + 1 < dimensions_.size()) {
        read_row(dimension + 1, at);
      } else {
        put(at);
      }
      ++index;
    } while (lexer_.accept(','));
    lexer_.expect('}');
    return index;
  }

  void put(int64_t element) {
    const int32_t line = lexer_.peek().line;
    const size_t bytes = static_cast<size_t>(bits_of(symbol_->type) / 8), at = static_cast<size_t>(element) * bytes;
    uint64_t value = 0;
    if (at_constant(lexer_)) {
      value = bits(line, read_constant(lexer_));
    } else {
      symbol_->addresses.push_back(read_address(static_cast<int64_t>(at)));
    }
    std::vector<std::byte>& initial = symbol_->initial;
    if (initial.size() < at + bytes) {
      reading_.budget.spend(line, static_cast<int64_t>(at + bytes - initial.size()), "initial values");
      initial.resize(at + bytes);
    }
    for (size_t i = 0; i < bytes && i < 8; ++i) initial[at + i] = static_cast<std::byte>(value >> (8 * i));
  }

  // Reads "x+8" or "generic(x)+8". Both forms are equal, because variables with initial values have generic addresses.
  AddressValue read_address(int64_t at) {
    Token name = lexer_.expect(Token::Kind::word, "a number");
    if (name.text == "generic" && lexer_.accept('(')) {
      name = lexer_.expect(Token::Kind::word, "the name of a variable");
      lexer_.expect(')');
    }
    const std::string what = "an initial value of " + quote(symbol_->name) + " is the address of " + quote(name.text);
    const Entity entity = reading_.names.find(name.text);
    if (entity.kind != Entity::Kind::symbol) {
      unsupported(name.line, what + ": declare that variable earlier");
    }
    if (bits_of(symbol_->type) != 64 || symbol_->type >= Type::f16) {
      unsupported(name.line, what + " and needs a .u64, not a ." + name_of(symbol_->type) + ": declare a .u64");
    }
    return {at, entity.index, read_offset(lexer_)};
  }

  // Returns the value in the variable's type.
  uint64_t bits(int32_t line, const Constant& value) const {
    const bool is_f32 = symbol_->type == Type::f32, is_f64 = symbol_->type == Type::f64;
    const bool is_integer = symbol_->type < Type::f16;
    if (value.is_real() ? !is_f32 && !is_f64 : !is_integer) {
      refuse(line, "an initial value of " + quote(symbol_->name) + " is " +
                       (value.is_real() ? "a real" : "an integer") + " number, which a variable of type ." +
                       name_of(symbol_->type) + " cannot have: correct the value");
    }
    if (is_f32 && value.kind == Constant::Kind::f64) {
      return std::bit_cast<uint32_t>(static_cast<float>(std::bit_cast<double>(value.bits)));
    }
    if (is_f64 && value.kind == Constant::Kind::f32) {
      return std::bit_cast<uint64_t>(double{std::bit_cast<float>(static_cast<uint32_t>(value.bits))});
    }
    return value.bits;
  }

  Reading& reading_;
  Lexer& lexer_;
  const std::vector<int64_t>& dimensions_;
  Symbol* symbol_;
};

// Reads "[4][8]" or "[]". The first dimension may be 0.
std::vector<int64_t> read_dimensions(Lexer& lexer) {
  std::vector<int64_t> dimensions;
  while (lexer.peek().is('[')) {
    const int32_t line = lexer.take().line;
    if (dimensions.size() == kMaxDimensions) {
      refuse(line, "an array must have at most 16 dimensions: join some dimensions");
    }
    const bool is_open = dimensions.empty() && lexer.peek().is(']');
    dimensions.push_back(is_open ? 0 : read_count(lexer, "elements of an array", 1, kMaxBytes));
    lexer.expect(']');
  }
  return dimensions;
}

int32_t read_alignment(Lexer& lexer) {
  const int32_t line = lexer.peek().line;
  const int64_t alignment = read_count(lexer, "alignment", 1, kMaxAlignment);
  if (!std::has_single_bit(static_cast<uint64_t>(alignment))) {
    refuse(line, "alignment (" + std::to_string(alignment) + ") must be a power of two: correct the number");
  }
  return static_cast<int32_t>(alignment);
}

// Skips the promise about the target of a pointer parameter: ".ptr .global .align 16"
void skip_pointer(Lexer& lexer) {
  if (lexer.peek().kind == Token::Kind::dotted && variable_space(lexer.peek().text) != Space::generic) lexer.take();
  if (lexer.accept("align")) read_alignment(lexer);
}

// Skips ".attribute(.managed)", because the host can access all memory, and ".unified(1, 2)".
void skip_attribute(Lexer& lexer) {
  lexer.expect('(');
  do {
    const Token attribute = lexer.expect(Token::Kind::dotted, "an attribute");
    if (attribute.text != "managed" && attribute.text != "unified") {
      unsupported(attribute.line, "attribute " + quote(attribute.text) + " is not supported: remove the attribute");
    }
    if (!lexer.accept('(')) continue;
    do read_constant(lexer);
    while (lexer.accept(','));
    lexer.expect(')');
  } while (lexer.accept(','));
  lexer.expect(')');
}

Type read_type(Lexer& lexer, bool of_register) {
  const Token word = lexer.expect(Token::Kind::dotted, "a type");
  const Type type = type_named(word.text);
  if (word.text == "texref" || word.text == "samplerref" || word.text == "surfref") {
    unsupported(word.line,
                "textures and surfaces are not supported: remove the variable of type " + with_dot(word.text));
  }
  const bool is_memory = type != Type::none && type != Type::pred && type <= Type::f64;
  if (!is_memory && !(of_register && type == Type::pred)) {
    refuse(word.line, "expected a type of a " + std::string(of_register ? "register" : "variable") + ", found " +
                          quote(with_dot(word.text)));
  }
  return type;
}

}  // namespace

Space variable_space(std::string_view dotted) {
  if (dotted == "global") return Space::global;
  if (dotted == "shared") return Space::shared;
  if (dotted == "const") return Space::constant;
  if (dotted == "local") return Space::local;
  if (dotted == "param") return Space::param;
  return Space::generic;
}

VariableType read_variable_type(Reading& reading, Space space) {
  Lexer& lexer = reading.lexer;
  VariableType type;
  type.space = space;
  while (type.type == Type::none) {
    if (lexer.accept("align")) {
      type.alignment = read_alignment(lexer);
    } else if (lexer.accept("attribute")) {
      skip_attribute(lexer);
    } else if (lexer.accept("v2")) {
      type.vector = 2;
    } else if (lexer.accept("v4")) {
      type.vector = 4;
    } else {
      type.type = read_type(lexer, false);
    }
  }
  if (space == Space::param && lexer.accept("ptr")) skip_pointer(lexer);
  if (type.alignment == 0) type.alignment = bits_of(type.type) / 8 * type.vector;
  return type;
}

Variable read_variable(Reading& reading, const VariableType& type, bool is_extern) {
  Lexer& lexer = reading.lexer;
  Variable variable{lexer.expect(Token::Kind::word, "the name of a variable"), {}};
  const Token& name = variable.name;
  Symbol& symbol = variable.symbol;
  symbol.name = name.text;
  symbol.space = type.space;
  symbol.type = type.type;
  symbol.alignment = type.alignment;
  symbol.is_extern = is_extern;
  std::vector<int64_t> dimensions = read_dimensions(lexer);
  if (type.vector > 1) dimensions.push_back(type.vector);
  const bool is_open = !dimensions.empty() && dimensions[0] == 0;
  for (const int64_t n : dimensions) {
    if (n > 0 && symbol.elements > kMaxBytes * 8 / bits_of(type.type) / n) {
      unsupported(name.line, quote(name.text) + " must have at most " + std::to_string(kMaxBytes >> 30) +
                                 " GiB: declare fewer elements");
    }
    symbol.elements *= is_open && n == 0 ? 1 : n;
  }
  int64_t rows = 0;
  if (lexer.accept('=')) {
    if (type.space != Space::global && type.space != Space::constant) {
      refuse(name.line, quote(name.text) + " must be in .global or .const to have initial values: remove the values");
    }
    rows = InitialValues(reading, dimensions, &symbol).read();
  }
  if (is_open) symbol.elements *= rows;
  if (symbol.elements == 0 && !is_extern && type.space != Space::param) {
    refuse(name.line,
           quote(name.text) +
               " must have a size: add the size, because only .extern .shared arrays have the size of the launch");
  }
  return variable;
}

void read_registers(Reading& reading) {
  Lexer& lexer = reading.lexer;
  if (lexer.peek().is(Token::Kind::dotted, "v2") || lexer.peek().is(Token::Kind::dotted, "v4")) {
    unsupported(lexer.peek().line, "registers that are vectors are not supported: declare one for each element");
  }
  const Type type = read_type(lexer, true);
  do {
    const Token name = lexer.expect(Token::Kind::word, "the name of a register");
    bool is_new = true;
    if (lexer.accept('<')) {
      is_new = reading.names.declare_registers(name.text, type, read_count(lexer, "registers", 1, kMaxRegisters));
      lexer.expect('>');
    } else {
      is_new = reading.names.declare_register(name.text, type);
    }
    if (!is_new) refuse(name.line, quote(name.text) + " must be declared once in a scope: rename one declaration");
  } while (lexer.accept(','));
  lexer.expect(';');
}

}  // namespace tandem::vgpu::ptx
