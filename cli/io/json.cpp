#include "cli/io/json.h"

#include <algorithm>
#include <nlohmann/json.hpp>

namespace tandem::io {
namespace {

using Ordered = nlohmann::ordered_json;

Json json_from(const Ordered& from) {
  switch (from.type()) {
    case Ordered::value_t::boolean: return from.get<bool>();
    case Ordered::value_t::number_integer: return from.get<int64_t>();
    case Ordered::value_t::number_unsigned: return from.get<uint64_t>();
    case Ordered::value_t::number_float: return from.get<double>();
    case Ordered::value_t::string: return from.get<std::string>();
    case Ordered::value_t::array: {
      Json list = Json::list();
      for (const Ordered& item : from) list.add(json_from(item));
      return list;
    }
    case Ordered::value_t::object: {
      Json object = Json::object();
      for (const auto& item : from.items()) object.add(item.key(), json_from(item.value()));
      return object;
    }
    default: return nullptr;
  }
}

class Adapter : public nlohmann::json_sax<nlohmann::json> {
 public:
  explicit Adapter(JsonEvents& events) : events_(events) {}
  bool null() override { return events_.null(); }
  bool boolean(bool value) override { return events_.boolean(value); }
  bool number_integer(int64_t value) override { return events_.number_integer(value); }
  bool number_unsigned(uint64_t value) override { return events_.number_unsigned(value); }
  bool number_float(double value, const std::string& text) override { return events_.number_float(value, text); }
  bool string(std::string& text) override { return events_.string(text); }
  bool binary(binary_t&) override { return false; }  // JSON text has no binary values
  bool start_object(size_t) override { return events_.start_object(); }
  bool key(std::string& name) override { return events_.key(name); }
  bool end_object() override { return events_.end_object(); }
  bool start_array(size_t) override { return events_.start_array(); }
  bool end_array() override { return events_.end_array(); }
  bool parse_error(size_t position, const std::string&, const nlohmann::json::exception& error) override {
    return events_.parse_error(position, error.what());
  }

 private:
  JsonEvents& events_;
};

struct Converter {
  Ordered operator()(const Json::List& items) const {
    Ordered list = Ordered::array();
    for (const Json& item : items) list.push_back(item.visit_value(*this));
    return list;
  }
  Ordered operator()(const Json::Members& members) const {
    Ordered object = Ordered::object();
    for (const auto& [key, value] : members) object[key] = value.visit_value(*this);
    return object;
  }
  Ordered operator()(const auto& value) const { return value; }
};

}  // namespace

const Json* Json::find(std::string_view key) const {
  const auto found = std::ranges::find(members(), key, &Member::first);
  return found == members().end() ? nullptr : &found->second;
}

std::optional<bool> Json::boolean() const {
  const bool* value = std::get_if<bool>(&value_);
  return value ? std::optional(*value) : std::nullopt;
}

std::optional<std::string> Json::text() const {
  const std::string* value = std::get_if<std::string>(&value_);
  return value ? std::optional(*value) : std::nullopt;
}

std::optional<double> Json::real() const {
  if (const double* value = std::get_if<double>(&value_)) return *value;
  if (const int64_t* value = std::get_if<int64_t>(&value_)) return static_cast<double>(*value);
  if (const uint64_t* value = std::get_if<uint64_t>(&value_)) return static_cast<double>(*value);
  return std::nullopt;
}

std::optional<int64_t> Json::integer() const {
  if (const int64_t* value = std::get_if<int64_t>(&value_)) return *value;
  const uint64_t* value = std::get_if<uint64_t>(&value_);
  return value && *value <= uint64_t{INT64_MAX} ? std::optional(static_cast<int64_t>(*value)) : std::nullopt;
}

std::optional<uint64_t> Json::unsigned_integer() const {
  if (const uint64_t* value = std::get_if<uint64_t>(&value_)) return *value;
  const int64_t* value = std::get_if<int64_t>(&value_);
  return value && *value >= 0 ? std::optional(static_cast<uint64_t>(*value)) : std::nullopt;
}

Json& Json::operator[](std::string_view key) {
  auto& all = std::get<Members>(value_);
  const auto found = std::ranges::find(all, key, &Member::first);
  return found == all.end() ? all.emplace_back(std::string(key), Json()).second : found->second;
}

std::string Json::dump(int indent) const { return visit_value(Converter()).dump(indent); }

Json parse_json(std::string_view text) {
  constexpr bool exceptions = true, comments = true;
  try {
    return json_from(Ordered::parse(text.begin(), text.end(), nullptr, exceptions, comments));
  } catch (const Ordered::exception& error) {
    throw JsonError(error.what());
  }
}

void read_json(std::string_view text, JsonEvents& events) {
  Adapter adapter(events);
  nlohmann::json::sax_parse(text.begin(), text.end(), &adapter);
}

}  // namespace tandem::io
