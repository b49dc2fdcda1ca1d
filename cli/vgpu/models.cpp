#include "cli/vgpu/models.h"

#include "base/text.h"
#include "cli/gpu.h"
#include "cli/terminal.h"
#include "vgpu/src/machine/model.h"

namespace tandem::tool {

std::string models_table() {
  std::vector<const vgpu::Model*> models;
  throw_if_failed(vgpu::all_models(&models));
  std::vector<std::string> header = {""};
  for (const vgpu::Model* model : models) header.push_back("vgpu:" + model->name);
  Table table(header);
  const auto row = [&](const std::string& what, auto value) {
    std::vector<std::string> cells = {what};
    for (const vgpu::Model* model : models) cells.push_back(str_cat(value(*model)));
    table.add(cells);
  };
  using vgpu::Model;
  row("compute capability", [](const Model& m) { return str_cat(m.compute_major, ".", m.compute_minor); });
  row("multiprocessors", [](const Model& m) { return m.sm_count; });
  row("clock, MHz", [](const Model& m) { return m.clock_khz / 1000; });
  row("memory", [](const Model& m) { return bytes_text(static_cast<double>(m.memory_bytes)); });
  row("memory clock, MHz", [](const Model& m) { return m.memory_clock_khz / 1000; });
  row("memory bus, bits", [](const Model& m) { return m.memory_bus_bits; });
  row("L2 cache", [](const Model& m) { return bytes_text(static_cast<double>(m.l2_bytes)); });
  row("shared memory of a block, bytes", [](const Model& m) { return m.shared_bytes_per_block; });
  row("tensor memory of a block, columns", [](const Model& m) { return m.tensor_memory_columns; });
  row("registers of a block", [](const Model& m) { return m.registers_per_sm; });
  row("threads of a block", [](const Model& m) { return m.max_threads_per_block; });
  row("blocks of a cluster", [](const Model& m) { return m.max_cluster; });
  row("products of 16 bits a clock", [](const Model& m) { return m.products; });
  row("exponentials a clock", [](const Model& m) { return m.exponentials; });
  row("decodes", [](const Model& m) { return std::string(m.wgmma ? "wgmma" : m.tcgen05 ? "tcgen05" : "-"); });
  row("products of bytes by tcgen05", [](const Model& m) { return std::string(m.tcgen05_i8 ? "yes" : "-"); });
  return table.text();
}

}  // namespace tandem::tool
