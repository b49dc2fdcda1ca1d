// Refused values of environment variables, and the messages.
#include "base/env.h"

#include <gtest/gtest.h>

#include "base/instruction_set.h"

namespace tandem::test {
namespace {

Env with(std::string Env::*variable, const std::string& value) {
  Env env;
  env.*variable = value;
  return env;
}

void refused(const Env& env, const std::string& sentence) {
  const Status status = check(env);
  EXPECT_EQ(status.code, TANDEM_INVALID_ARGUMENT) << sentence;
  EXPECT_EQ(status.message.rfind(sentence, 0), 0u) << status.message;
}

TEST(Environment, EmptyIsSound) { EXPECT_TRUE(check(Env{}).ok()); }

TEST(Environment, Switches) {
  for (const char* value : {"on", "off"}) EXPECT_TRUE(check(with(&Env::cache, value)).ok());
  for (const char* value : {"0", "OFF", "none", " off"})
    refused(with(&Env::cache, value), std::string("TANDEM_CACHE (\"") + value + "\") must be \"on\" or \"off\"");
  for (const char* value : {"0", "1"}) {
    EXPECT_TRUE(check(with(&Env::log, value)).ok());
    EXPECT_EQ(with(&Env::log, value).logging(), value[0] == '1');
  }
  for (const char* value : {"", "0", "1"}) {
    EXPECT_TRUE(check(with(&Env::line_info, value)).ok());
    EXPECT_EQ(with(&Env::line_info, value).has_line_info(), std::string_view(value) == "1");
  }
  refused(with(&Env::line_info, "on"), "TANDEM_LINE_INFO (\"on\") must be \"1\" or \"0\"");
  refused(with(&Env::log, "yes"), "TANDEM_LOG (\"yes\") must be \"1\" or \"0\"");
}

TEST(Environment, WordsOfSm100) {
  for (const char* value : {"", "no_clc", "exact_n,wait_products,no_two_cta,no_overlap,clc"})
    EXPECT_TRUE(check(with(&Env::sm100, value)).ok());
  for (const char* value : {"no-clc", "no_clc exact_n", "exact_n,,clc", "EXACT_N"})
    refused(with(&Env::sm100, value), std::string("TANDEM_SM100 (\"") + value + "\") must consist of the words ");
  EXPECT_TRUE(lists("clc,exact_n", "exact_n"));
  EXPECT_FALSE(lists("no_clc,exact_n", "clc") || lists("", "clc"));
}

TEST(Environment, InstructionSets) {
  for (const std::string_view name : instruction_sets())
    EXPECT_TRUE(check(with(&Env::cpu_target, std::string(name))).ok());
  for (const char* name : {"avx1024", "AVX2", "generic,avx2"})
    refused(with(&Env::cpu_target, name), std::string("TANDEM_CPU_TARGET (\"") + name + "\") must be one of \"");
}

}  // namespace
}  // namespace tandem::test
