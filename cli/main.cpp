// The tandem command.
#include <string>
#include <vector>

#include "cli/commit.h"
#include "cli/flags.h"
#include "cli/vgpu/exec.h"
#include "gpu/virtual.h"
#include "vgpu/src/device.h"

int main(int argc, char** argv) {
  using namespace tandem::tool;
  tandem::gpu::use_linked_virtual(tandem::vgpu::open);
  constexpr char footer[] = R"(Start here:
  tandem demo                                        attention of a real model: checked, timed, drawn
  tandem attend qkv.safetensors --causal --grad --out result.safetensors
  tandem attend q.npy k.npy v.npy --out result/      the same from numpy
  tandem verify --dtype bf16 --seqlen-q 2048         compare with float64
  tandem bench --svg bench.svg                       measure speed
  tandem explain --preset llama                      the plan of a GPU, and its least time
  tandem vgpu check --seqlen 300 --causal            find races in the GPU's kernel (no GPU needed)
  tandem <command> --help                            more examples of each)";
  const std::vector<std::string> typed(argv, argv + argc);
  const auto declare = [&](Command root) {
    add_demo(root, typed[0]);
    add_attend(root);
    add_verify(root);
    add_bench(root);
    add_explain(root);
    add_cache(root);
    add_info(root);
    add_vgpu(root, typed);
  };
  return run_command_line("Exact attention, forward and backward.", footer,
                          std::string("tandem ") + tandem_version() + " (commit " + commit() + ")", without_mark(typed),
                          declare);
}
