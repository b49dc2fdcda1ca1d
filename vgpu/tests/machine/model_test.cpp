// Tests of the files of vgpu/models, and of refused files.
#include "vgpu/src/machine/model.h"

#include <gtest/gtest.h>

#include <algorithm>

namespace tandem::vgpu {
namespace {

constexpr const char* kGood = R"(# A chip.
chip = NVIDIA X1
compute_capability = 10.3
multiprocessors = 148  # of 160
clock_mhz = 1965
memory_gib = 268
memory_clock_mhz = 3996
memory_bus_bits = 8192
l2_mib = 126

shared_bytes = 232448
tensor_memory_columns = 512
threads = 1024
registers = 65536
blocks = 16
products = 4096
exponentials = 32
decodes = tcgen05 tcgen05.i8
)";

// Returns the good file with one line changed; "" removes the line.
std::string changed(const std::string& line, const std::string& to) {
  std::string text = kGood;
  const size_t at = text.find("\n" + line);
  EXPECT_NE(at, std::string::npos) << line;
  const size_t end = text.find('\n', at + 1);
  return text.replace(at + 1, end - at - (to.empty() ? 0 : 1), to);
}

TEST(Models, AreReadFromTheirText) {
  Model m;
  const Status status = parse_model("x1.model", kGood, &m);
  ASSERT_TRUE(status.ok()) << status.message;
  EXPECT_EQ(m.name, "x1");
  EXPECT_EQ(m.marketing_name, "NVIDIA X1 (virtual)");
  EXPECT_EQ(m.compute_major, 10);
  EXPECT_EQ(m.compute_minor, 3);
  EXPECT_EQ(m.sm_count, 148);
  EXPECT_EQ(m.clock_khz, 1'965'000);
  EXPECT_EQ(m.memory_bytes, int64_t{268} << 30);
  EXPECT_EQ(m.memory_clock_khz, 3'996'000);
  EXPECT_EQ(m.memory_bus_bits, 8192);
  EXPECT_EQ(m.l2_bytes, 126 << 20);
  EXPECT_EQ(m.shared_bytes_per_block, 232448);
  EXPECT_EQ(m.tensor_memory_columns, 512);
  EXPECT_EQ(m.max_threads_per_block, 1024);
  EXPECT_EQ(m.registers_per_sm, 65536);
  EXPECT_EQ(m.max_cluster, 16);
  EXPECT_EQ(m.products, 4096);
  EXPECT_EQ(m.exponentials, 32);
  EXPECT_FALSE(m.wgmma);
  EXPECT_TRUE(m.tcgen05);
  EXPECT_TRUE(m.tcgen05_i8);
}

TEST(Models, AreRefusedByLine) {
  const struct {
    std::string text, sentence;
  } cases[] = {
      {changed("multiprocessors", "multiprocessors 148"),
       "x1.model:4: \"multiprocessors 148\" must be \"key = value\""},
      {changed("multiprocessors", "sms = 148"), "x1.model:4: \"sms\" must be a key of a model"},
      {changed("clock_mhz", "multiprocessors = 1"),
       "x1.model:5: \"multiprocessors\" must be given once: remove the second"},
      {changed("clock_mhz", "clock_mhz = 1.9e3"), "x1.model:5: clock_mhz (\"1.9e3\") must be a whole number from 1"},
      {changed("clock_mhz", "clock_mhz ="), "x1.model:5: clock_mhz (\"\") must be a whole number"},
      {changed("blocks", "blocks = 17"), "x1.model:15: blocks (\"17\") must be a whole number from 1 to 16"},
      {changed("chip", "chip ="), "x1.model:2: chip must be the name"},
      {changed("compute", "compute_capability = 8.0"), "x1.model:3: compute_capability (\"8.0\") must be 9.N or 10.N"},
      {changed("compute", "compute_capability = 10"), "x1.model:3: compute_capability (\"10\") must be"},
      {changed("decodes", "decodes = tcgen05 mfma"), "x1.model:18: decodes: \"mfma\" must be wgmma, tcgen05"},
      {changed("decodes", "decodes = tcgen05.i8"), "x1.model:18: tensor_memory_columns must be 512 with"},
      {changed("tensor", "tensor_memory_columns = 256"), "x1.model:18: tensor_memory_columns must be 512 with"},
      {changed("exponentials", ""), "x1.model:17: \"exponentials\" is missing"},
      {"", "x1.model:0: \"multiprocessors\" is missing"},
  };
  for (const auto& one : cases) {
    Model model;
    const Status status = parse_model("x1.model", one.text, &model);
    EXPECT_EQ(status.code, TANDEM_INVALID_ARGUMENT);
    EXPECT_EQ(status.message.substr(0, one.sentence.size()), one.sentence) << status.message;
  }
}

TEST(Models, OfTheLibraryAreAllGood) {
  std::vector<const Model*> models;
  const Status status = all_models(&models);
  ASSERT_TRUE(status.ok()) << status.message;
  EXPECT_EQ(model_names(), (std::vector<std::string>{"b200", "b300", "h100", "h200"}));
  for (const Model* model : models) EXPECT_EQ(find_model(model->name), model);
  EXPECT_EQ(find_model("h300"), nullptr);
  EXPECT_EQ(find_model("h200")->memory_bus_bits, 6144);
  EXPECT_FALSE(find_model("b300")->tcgen05_i8) << "sm_103a has no products of bytes";
}

}  // namespace
}  // namespace tandem::vgpu
