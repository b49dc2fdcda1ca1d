// JSON values, text and events. Only json.cpp includes the JSON library, whose header takes seconds to compile.
#pragma once

#include <concepts>
#include <cstdint>
#include <initializer_list>
#include <map>
#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

namespace tandem::io {

class Json {
 public:
  using List = std::vector<Json>;
  using Member = std::pair<std::string, Json>;
  using Members = std::vector<Member>;  // in the order of writing

  Json(std::nullptr_t = nullptr) {}
  Json(bool value) : value_(value) {}
  Json(double value) : value_(value) {}
  Json(std::signed_integral auto value) : value_(int64_t{value}) {}
  Json(std::unsigned_integral auto value) : value_(uint64_t{value}) {}
  Json(std::string value) : value_(std::move(value)) {}
  Json(std::string_view value) : value_(std::string(value)) {}
  Json(const char* value) : value_(std::string(value)) {}
  Json(std::initializer_list<Member> members) : value_(Members(members)) {}  // creates an object
  template <class T>
  Json(const std::vector<T>& values) : value_(List(values.begin(), values.end())) {}
  template <class T>
  Json(const std::map<std::string, T>& members) : value_(Members(members.begin(), members.end())) {}

  static Json list() { return Json(Value(List())); }
  static Json object() { return Json(Value(Members())); }

  bool is_object() const { return std::holds_alternative<Members>(value_); }
  bool is_list() const { return std::holds_alternative<List>(value_); }
  const Members& members() const { return std::get<Members>(value_); }
  const List& items() const { return std::get<List>(value_); }
  const Json* find(std::string_view key) const;  // nullptr: absent; requires an object

  // Returns the value if it has the type. A whole number is also a real. A negative number is not unsigned.
  std::optional<bool> boolean() const;
  std::optional<std::string> text() const;
  std::optional<double> real() const;
  std::optional<int64_t> integer() const;
  std::optional<uint64_t> unsigned_integer() const;

  Json& operator[](std::string_view key);  // appends an absent key; requires an object
  void add(Json item) { std::get<List>(value_).push_back(std::move(item)); }
  void add(std::string key, Json item) { std::get<Members>(value_).emplace_back(std::move(key), std::move(item)); }

  std::string dump(int indent = -1) const;  // -1: one line
  decltype(auto) visit_value(auto&& visitor) const { return std::visit(visitor, value_); }

 private:
  using Value = std::variant<std::nullptr_t, bool, int64_t, uint64_t, double, std::string, List, Members>;
  explicit Json(Value value) : value_(std::move(value)) {}

  Value value_;
};

class JsonError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// Throws JsonError. Comments are skipped; the last value of a repeated key counts.
Json parse_json(std::string_view text);

// The events of a parser, in order. Each function returns whether to continue.
class JsonEvents {
 public:
  virtual ~JsonEvents() = default;
  virtual bool null() = 0;
  virtual bool boolean(bool value) = 0;
  virtual bool number_integer(int64_t value) = 0;  // for negative numbers
  virtual bool number_unsigned(uint64_t value) = 0;
  virtual bool number_float(double value, const std::string& text) = 0;
  virtual bool string(const std::string& text) = 0;
  virtual bool start_object() = 0;
  virtual bool key(const std::string& name) = 0;
  virtual bool end_object() = 0;
  virtual bool start_array() = 0;
  virtual bool end_array() = 0;
  virtual bool parse_error(size_t position, const std::string& why) = 0;  // position in bytes
};
void read_json(std::string_view text, JsonEvents& events);

}  // namespace tandem::io
