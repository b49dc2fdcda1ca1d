#include "cli/command_line.h"

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <limits>
#include <numeric>

#include "base/env.h"
#include "base/text.h"
#include "cli/flags.h"

namespace tandem::tool {

enum class Reals { any, finite, at_least_zero, above_zero, probability };

struct Flag::Rule {
  Reals reals = Reals::any;
  int64_t least = std::numeric_limits<int64_t>::min(), most = std::numeric_limits<int64_t>::max();
  std::vector<std::string> values;  // allowed values of a text; empty: any
};

namespace {

using Rule = Flag::Rule;
constexpr int64_t kLeastInt64 = std::numeric_limits<int64_t>::min(), kMaxInt64 = std::numeric_limits<int64_t>::max();

[[noreturn]] void refuse(const std::string& name, const std::string& text, const std::string& rule) {
  throw CLI::ValidationError(str_cat(name, " (", text, ") must be ", rule));
}

// strtoull accepts negative numbers, which wrap around, and both functions skip spaces.
bool starts_number(const std::string& text) { return !text.empty() && (std::isdigit(text[0]) || text[0] == '-'); }
int base_of(const std::string& text) { return text.find_first_of("xX") == std::string::npos ? 10 : 16; }

int64_t integer_from(const std::string& name, const std::string& text, const Rule& rule) {
  char* end = nullptr;
  errno = 0;
  const int64_t value = std::strtoll(text.c_str(), &end, base_of(text));
  const bool is_number = starts_number(text) && *end == '\0';
  const bool too_large = is_number && (errno == ERANGE ? text[0] != '-' : value > rule.most);
  const bool fits = is_number && errno == 0 && value >= rule.least && value <= rule.most;
  if (fits) return value;
  const bool bounded = too_large || rule.most != kMaxInt64 || (is_number && rule.least == kLeastInt64);
  if (bounded) refuse(name, text, str_cat("a whole number from ", rule.least, " to ", rule.most));
  if (rule.least == kLeastInt64) refuse(name, text, "a whole number");
  refuse(name, text, str_cat("a whole number of at least ", rule.least));
}

uint64_t unsigned_from(const std::string& name, const std::string& text) {
  char* end = nullptr;
  errno = 0;
  const uint64_t value = std::strtoull(text.c_str(), &end, base_of(text));
  if (starts_number(text) && text[0] != '-' && *end == '\0' && errno == 0) return value;
  refuse(name, text, str_cat("a whole number from 0 to ", std::numeric_limits<uint64_t>::max()));
}

double real_from(const std::string& name, const std::string& text, const Rule& rule) {
  char* end = nullptr;
  errno = 0;
  const double value = std::strtod(text.c_str(), &end);
  const bool is_number = !text.empty() && !std::isspace(text[0]) && *end == '\0';
  const bool overflows = is_number && errno == ERANGE && std::isinf(value);
  if (overflows) refuse(name, text, "a number that float64 can represent");
  const struct {
    bool fits;
    const char* sentence;
  } rules[] = {{true, "a number"},
               {std::isfinite(value), "a finite number"},
               {std::isfinite(value) && value >= 0, "a finite number of at least 0"},
               {std::isfinite(value) && value > 0, "a finite number above 0"},
               {value >= 0 && value < 1, "a number of at least 0 and below 1"}};
  const auto& wanted = rules[static_cast<size_t>(rule.reals)];
  if (!is_number || !wanted.fits) refuse(name, text, wanted.sentence);
  return value;
}

const std::string& text_from(const std::string& name, const std::string& text, const Rule& rule) {
  if (rule.values.empty() || std::ranges::find(rule.values, text) != rule.values.end()) return text;
  std::string known;
  for (const std::string& value : rule.values)
    known += (known.empty() ? "" : &value == &rule.values.back() ? " or " : ", ") + value;
  const std::string near = nearest(text, rule.values);
  refuse(name, text, known + (near.empty() ? "" : ": did you mean " + near + "?"));
}

struct OptionText {
  const char *names, *help, *type;
};

// Declares an option whose values are passed to `set`, one after another.
Flag declare(CLI::App* app, const OptionText& text, std::shared_ptr<Rule> rule,
             std::function<void(const std::string& name, const std::vector<std::string>& texts)> set,
             std::function<std::string()> shown = {}, bool is_list = false) {
  const auto option = std::make_shared<CLI::Option*>();
  *option = app->add_option(
      text.names,
      [option, set = std::move(set)](const std::vector<std::string>& texts) {
        set((*option)->get_name(), texts);
        return true;
      },
      text.help, false, std::move(shown));
  (*option)->type_name(text.type);
  if (is_list) (*option)->expected(CLI::detail::expected_max_vector_size);
  return {*option, std::move(rule)};
}

size_t distance_between(const std::string& a, const std::string& b) {
  std::vector<size_t> row(b.size() + 1);
  std::iota(row.begin(), row.end(), size_t{0});
  for (size_t i = 1; i <= a.size(); ++i) {
    size_t diagonal = row[0];
    row[0] = i;
    for (size_t j = 1; j <= b.size(); ++j) {
      const size_t above = row[j];
      row[j] = std::min({above + 1, row[j - 1] + 1, diagonal + (a[i - 1] == b[j - 1] ? 0 : 1)});
      diagonal = above;
    }
  }
  return row.back();
}

std::vector<std::string> flags_of(const CLI::App& app) {
  std::vector<std::string> names;
  for (const CLI::Option* option : app.get_options())
    for (const std::string& name : option->get_lnames()) names.push_back("--" + name);
  return names;
}

std::vector<std::string> commands_of(const CLI::App& app) {
  std::vector<std::string> names;
  for (const CLI::App* command : app.get_subcommands([](const CLI::App*) { return true; }))
    names.push_back(command->get_name());
  return names;
}

// Returns one sentence about the first word that the command does not know, or "".
std::string unknown_word(const CLI::App& app, const std::string& command, const std::vector<std::string>& extras) {
  const auto meant = [](const std::string& word, const std::vector<std::string>& names) {
    const std::string near = nearest(word, names);
    return near.empty() ? std::string() : ": did you mean " + near + "?";
  };
  for (const std::string& extra : extras) {
    if (!extra.starts_with("-")) continue;
    const std::string word = extra.substr(0, extra.find('='));
    return word + " is not a flag of " + command + meant(word, flags_of(app));
  }
  if (extras.empty()) return "";
  const std::vector<std::string> commands = commands_of(app);
  return extras[0] + (commands.empty() ? " is one argument too many for " : " is not a command of ") + command +
         meant(extras[0], commands);
}

int report(CLI::App& app, const CLI::ParseError& error) {
  std::string command = app.get_name();
  CLI::App* last = &app;
  while (!last->get_subcommands().empty()) {
    last = last->get_subcommands().front();
    command += " " + last->get_name();
  }
  std::string sentence = error.what();
  const bool has_extras =
      dynamic_cast<const CLI::ExtrasError*>(&error) || dynamic_cast<const CLI::RequiredError*>(&error);
  const std::string unknown = has_extras ? unknown_word(*last, command, app.remaining(true)) : "";
  if (!unknown.empty()) sentence = unknown;
  std::fprintf(stderr, "tandem: %s; see %s --help\n", sentence.c_str(), command.c_str());
  return 2;
}

}  // namespace

std::string nearest(const std::string& word, const std::vector<std::string>& names) {
  std::string best;
  size_t least = std::max<size_t>(2, word.size() / 3) + 1;
  for (const std::string& name : names) {
    const size_t distance = distance_between(word, name);
    if (distance < least && distance < name.size()) least = distance, best = name;
  }
  return best;
}

Flag Flag::at_least_zero() {
  rule_->least = 0;
  rule_->reals = Reals::at_least_zero;
  option_->check(CLI::Validator("NONNEGATIVE"));
  return *this;
}

Flag Flag::above_zero() {
  rule_->least = 1;
  rule_->reals = Reals::above_zero;
  option_->check(CLI::Validator("POSITIVE"));
  return *this;
}

Flag Flag::finite() {
  rule_->reals = Reals::finite;
  return *this;
}

Flag Flag::probability() {
  rule_->reals = Reals::probability;
  return *this;
}

Flag Flag::within(int64_t least, int64_t most) {
  rule_->least = least;
  rule_->most = most;
  option_->check(CLI::Validator(str_cat("INT in [", least, " - ", most, "]")));
  return *this;
}

Flag Flag::one_of(std::vector<std::string> values) {
  std::string shown;
  for (const std::string& value : values) shown += (shown.empty() ? "{" : ",") + value;
  option_->check(CLI::Validator(shown + "}"));
  rule_->values = std::move(values);
  return *this;
}

Flag Flag::separated_by_commas() { return option_->delimiter(','), *this; }
Flag Flag::count(int least, int most) { return option_->expected(least, most), *this; }
Flag Flag::required() { return option_->required(), *this; }
Flag Flag::show_default() { return option_->capture_default_str(), *this; }
Flag Flag::environment(const char* variable) { return option_->envname(variable), *this; }
Flag Flag::group(const char* heading) { return option_->group(heading), *this; }
Flag Flag::needs(const char* flag) { return option_->needs(flag), *this; }
Flag Flag::excludes(const Flag& other) { return option_->excludes(other.option_), *this; }

Command Command::add(const char* name, const char* what) { return {app_->add_subcommand(name, what), exit_code_}; }
void Command::requires_command() { app_->require_subcommand(1); }
void Command::footer(const std::string& text) { app_->footer(text); }

void Command::run(std::function<int()> work) {
  app_->callback([exit_code = exit_code_, work = std::move(work)] {
    *exit_code = guarded([&work] {
      throw_if_failed(check(Env::get()));
      return work();
    });
  });
}

void Command::run_with_rest(std::function<int(std::vector<std::string>)> work) {
  app_->prefix_command();
  run([app = app_, work = std::move(work)] { return work(app->remaining()); });
}

Flag Command::flag(const char* names, bool& value, const char* help) {
  return {app_->add_flag(names, value, help), std::make_shared<Rule>()};
}

Flag Command::option(const char* names, std::string& value, const char* help) {
  const auto rule = std::make_shared<Rule>();
  return declare(
      app_, {names, help, "TEXT"}, rule,
      [rule, &value](const std::string& name, const std::vector<std::string>& texts) {
        value = text_from(name, texts.back(), *rule);
      },
      [&value] { return value; });
}

Flag Command::option(const char* names, int& value, const char* help) {
  const auto rule = std::make_shared<Rule>();
  rule->least = std::numeric_limits<int>::min();
  rule->most = std::numeric_limits<int>::max();
  return declare(
      app_, {names, help, "INT"}, rule,
      [rule, &value](const std::string& name, const std::vector<std::string>& texts) {
        value = static_cast<int>(integer_from(name, texts.back(), *rule));
      },
      [&value] { return std::to_string(value); });
}

Flag Command::option(const char* names, int64_t& value, const char* help) {
  const auto rule = std::make_shared<Rule>();
  return declare(
      app_, {names, help, "INT"}, rule,
      [rule, &value](const std::string& name, const std::vector<std::string>& texts) {
        value = integer_from(name, texts.back(), *rule);
      },
      [&value] { return std::to_string(value); });
}

Flag Command::option(const char* names, uint64_t& value, const char* help) {
  return declare(
      app_, {names, help, "UINT"}, std::make_shared<Rule>(),
      [&value](const std::string& name, const std::vector<std::string>& texts) {
        value = unsigned_from(name, texts.back());
      },
      [&value] { return std::to_string(value); });
}

Flag Command::option(const char* names, double& value, const char* help) {
  const auto rule = std::make_shared<Rule>();
  return declare(
      app_, {names, help, "FLOAT"}, rule,
      [rule, &value](const std::string& name, const std::vector<std::string>& texts) {
        value = real_from(name, texts.back(), *rule);
      },
      [&value] { return str_cat(value); });
}

Flag Command::option(const char* names, std::vector<std::string>& values, const char* help) {
  const auto rule = std::make_shared<Rule>();
  return declare(
      app_, {names, help, "TEXT"}, rule,
      [rule, &values](const std::string& name, const std::vector<std::string>& texts) {
        values.clear();
        for (const std::string& text : texts) values.push_back(text_from(name, text, *rule));
      },
      {}, true);
}

Flag Command::option(const char* names, std::vector<int64_t>& values, const char* help) {
  const auto rule = std::make_shared<Rule>();
  return declare(
      app_, {names, help, "INT"}, rule,
      [rule, &values](const std::string& name, const std::vector<std::string>& texts) {
        values.clear();
        for (const std::string& text : texts) values.push_back(integer_from(name, text, *rule));
      },
      {}, true);
}

Flag Command::option(const char* names, std::function<void(const std::string&)> apply, const char* help) {
  const auto rule = std::make_shared<Rule>();
  return declare(app_, {names, help, "TEXT"}, rule,
                 [rule, apply = std::move(apply)](const std::string& name, const std::vector<std::string>& texts) {
                   apply(text_from(name, texts.back(), *rule));
                 });
}

int run_command_line(const std::string& what, const std::string& footer, const std::string& version,
                     const std::vector<std::string>& words, const std::function<void(Command)>& declare) {
  CLI::App app(what, "tandem");
  app.footer(footer);
  app.set_version_flag("--version", version);
  app.require_subcommand(1);
  int exit_code = 0;
  declare(Command(&app, &exit_code));
  try {
    app.parse(std::vector<std::string>(words.rbegin(), words.rend() - 1));
  } catch (const CLI::Success& success) {
    return app.exit(success);
  } catch (const CLI::ParseError& error) {
    return report(app, error);
  }
  return exit_code;
}

}  // namespace tandem::tool
