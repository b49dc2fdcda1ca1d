// Commands, their flags and their help. Only command_line.cpp includes CLI11, whose header takes seconds to compile.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

namespace CLI {
class App;
class Option;
}  // namespace CLI

namespace tandem::tool {

// One flag or positional argument. Every function returns the flag itself.
class Flag {
 public:
  struct Rule;
  Flag(CLI::Option* option, std::shared_ptr<Rule> rule) : option_(option), rule_(std::move(rule)) {}

  // Limits a number. A refusal quotes the number as the user typed it.
  Flag at_least_zero();
  Flag above_zero();
  Flag finite();
  Flag probability();  // at least 0 and below 1
  Flag within(int64_t least, int64_t most);
  Flag one_of(std::vector<std::string> values);  // allowed values of a text

  Flag separated_by_commas();
  Flag count(int least, int most);  // number of values of a list
  Flag required();
  Flag show_default();
  Flag environment(const char* variable);  // the variable supplies the value of an absent flag
  Flag group(const char* heading);
  Flag needs(const char* flag);
  Flag excludes(const Flag& other);

 private:
  CLI::Option* option_;
  std::shared_ptr<Rule> rule_;
};

class Command {
 public:
  Command(CLI::App* app, int* exit_code) : app_(app), exit_code_(exit_code) {}

  Command add(const char* name, const char* what);  // adds a subcommand
  void requires_command();                          // a subcommand must follow
  void footer(const std::string& text);
  void run(std::function<int()> work);  // runs through guarded(); the result is the exit code
  void run_with_rest(std::function<int(std::vector<std::string>)> work);  // passes the words after the flags

  // names: "--heads-q,--heads", or "files" for a positional argument. The value must outlive the command line.
  Flag flag(const char* names, bool& value, const char* help);
  Flag option(const char* names, std::string& value, const char* help);
  Flag option(const char* names, int& value, const char* help);
  Flag option(const char* names, int64_t& value, const char* help);
  Flag option(const char* names, uint64_t& value, const char* help);
  Flag option(const char* names, double& value, const char* help);
  Flag option(const char* names, std::vector<std::string>& values, const char* help);
  Flag option(const char* names, std::vector<int64_t>& values, const char* help);
  Flag option(const char* names, std::function<void(const std::string&)> apply, const char* help);

 private:
  CLI::App* app_;
  int* exit_code_;
};

// Parses the whole command line: declare() adds the commands to the root. Returns the exit code: 2 if the words form no
// command, after one sentence on standard error that names the nearest command or flag.
int run_command_line(const std::string& what, const std::string& footer, const std::string& version,
                     const std::vector<std::string>& words, const std::function<void(Command)>& declare);

// Returns the name that differs from the word by the fewest letters, or "" if no name is near.
std::string nearest(const std::string& word, const std::vector<std::string>& names);

}  // namespace tandem::tool
