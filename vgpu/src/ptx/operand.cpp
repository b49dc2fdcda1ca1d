#include "vgpu/src/ptx/reading.h"
#include "vgpu/src/ptx/words.h"

namespace tandem::vgpu::ptx {
namespace {

using Kind = Operand::Kind;

constexpr int kDeepest = 4;  // vectors and addresses within each other: [map, {x, y}]

Operand make(Kind kind) {
  Operand operand;
  operand.kind = kind;
  return operand;
}

class Operands {
 public:
  explicit Operands(Reading& reading) : lexer_(reading.lexer), names_(reading.names) {}

  Operand read() {
    Operand first = read_one();
    if (!lexer_.accept('|')) return first;
    Operand pair = make(Kind::pair);
    pair.parts.reserve(2);
    pair.parts.push_back(std::move(first));
    pair.parts.push_back(read_one());
    return pair;
  }

 private:
  Operand read_one() {
    if (lexer_.peek().kind == Token::Kind::word && lexer_.peek().text != "WARP_SZ") return read_name();
    if (lexer_.peek().kind == Token::Kind::string) {
      Operand string = make(Kind::string);
      string.text = lexer_.take().text;
      return string;
    }
    if (at_constant(lexer_)) return read_number();
    if (lexer_.peek().is('{') || lexer_.peek().is('[')) return read_nested();
    if (!lexer_.accept('!')) lexer_.unexpected("an operand");
    const Token& next = lexer_.peek();
    const int32_t line = next.line;
    Operand negated = next.kind == Token::Kind::word ? read_name() : Operand();
    if (negated.kind != Kind::reg) refuse(line, "'!' must stand before a predicate register: remove the mark");
    negated.negated = true;
    return negated;
  }

  Operand read_number() {
    const Constant value = read_constant(lexer_);
    Operand number = make(value.is_real() ? Kind::real : Kind::integer);
    number.is_f32 = value.kind == Constant::Kind::f32;
    number.bits = value.bits;
    return number;
  }

  Operand read_nested() {
    if (++depth_ > kDeepest) {
      refuse(lexer_.peek().line, "operands must be nested less deeply: use one vector per operand");
    }
    Operand nested = lexer_.peek().is('{') ? read_vector() : read_address();
    --depth_;
    return nested;
  }

  Operand read_vector() {
    lexer_.expect('{');
    Operand vector = make(Kind::vector);
    do vector.parts.push_back(read_one());
    while (lexer_.accept(','));
    lexer_.expect('}');
    return vector;
  }

  Operand read_address() {
    lexer_.expect('[');
    const int32_t line = lexer_.peek().line;
    Operand address = make(Kind::address);
    address.parts.push_back(read_one());
    Operand& base = address.parts[0];
    if (base.kind == Kind::symbol) std::swap(address.bits, base.bits);  // sym+8: read with the name
    if (base.kind == Kind::reg && !base.negated) {
      address.bits = read_offset(lexer_);
    } else if (base.kind != Kind::symbol && base.kind != Kind::integer) {
      refuse(line, "an address must begin with a register, a variable or a number: correct the operand");
    }
    while (lexer_.accept(',')) address.parts.push_back(read_one());
    lexer_.expect(']');
    return address;
  }

  Operand read_name() {
    const Token name = lexer_.take();
    if (name.text == "_") return make(Kind::sink);
    const Entity entity = names_.find(name.text);
    switch (entity.kind) {
      case Entity::Kind::reg: return read_register(name, entity);
      case Entity::Kind::symbol: return read_symbol(name, entity);
      case Entity::Kind::function: {
        Operand function = make(Kind::function);
        function.text = name.text;
        return function;
      }
      case Entity::Kind::none: return read_special(name);
      default:
        refuse(name.line,
               quote(name.text) + " must not be a list of targets or a prototype: pass a register or a variable");
    }
  }

  Operand read_register(const Token& name, const Entity& entity) {
    if (lexer_.peek().kind == Token::Kind::dotted) {
      unsupported(name.line, quote(std::string(name.text) + with_dot(lexer_.peek().text)) +
                                 ": parts of a register are not supported: use mov, bfe or prmt");
    }
    Operand reg = make(Kind::reg);
    reg.reg = entity.index;
    return reg;
  }

  Operand read_symbol(const Token& name, const Entity& entity) {
    if (lexer_.peek().is('[')) {
      unsupported(name.line,
                  quote(name.text) + " with an index is not supported: write [" + std::string(name.text) + "+bytes]");
    }
    Operand symbol = make(Kind::symbol);
    symbol.symbol = entity.index;
    symbol.bits = read_offset(lexer_);
    return symbol;
  }

  Operand read_special(const Token& name) {
    if (!is_special_register(name.text)) {
      refuse(name.line, quote(name.text) +
                            " must be declared before its use: declare a register, variable or function of "
                            "this name");
    }
    Operand special = make(Kind::special);
    special.text = name.text;
    if (!has_components(name.text)) return special;
    const Token part =
        lexer_.expect(Token::Kind::dotted, "'.x', '.y' or '.z' after a special register that is a vector");
    if (part.text != "x" && part.text != "y" && part.text != "z" && part.text != "w") {
      refuse(part.line, quote(name.text) + " has no component " + quote(part.text) + ": use .x, .y or .z");
    }
    special.text.append(".").append(part.text);
    return special;
  }

  Lexer& lexer_;
  Names& names_;
  int depth_ = 0;
};

}  // namespace

Operand read_operand(Reading& reading) { return Operands(reading).read(); }

}  // namespace tandem::vgpu::ptx
