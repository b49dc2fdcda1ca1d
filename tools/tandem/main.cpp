// The tandem command.
#include <cstdio>

#include "gpu/virtual.h"
#include "tandem/flags.h"
#include "vgpu/device.h"
#include "vgpu/exec.h"

int main(int argc, char** argv) {
  using namespace tandem::tool;
  tandem::gpu::use_linked_virtual(tandem::vgpu::open);
  CLI::App app("Exact attention, forward and backward.", "tandem");
  app.footer(R"(Start here:
  tandem demo                                        a real model's attention, checked, timed, drawn
  tandem attend qkv.safetensors --causal --grad --out result.safetensors
  tandem attend q.npy k.npy v.npy --out result/      the same from numpy
  tandem verify --dtype bf16 --seqlen-q 2048         how exact is it?
  tandem bench --svg bench.svg                       how fast is it?
  tandem explain --preset llama                      what would a GPU do, and how fast at best?
  tandem vgpu check --seqlen 300 --causal            is the GPU's kernel free of races? (no GPU needed)
  tandem <command> --help                            more examples of each)");
  app.set_version_flag("--version", std::string("tandem ") + tandem_version());
  app.require_subcommand(1);
  int exit_code = 0;
  add_demo(app, &exit_code);
  add_attend(app, &exit_code);
  add_verify(app, &exit_code);
  add_bench(app, &exit_code);
  add_explain(app, &exit_code);
  add_cache(app, &exit_code);
  add_info(app, &exit_code);
  std::vector<std::string> words(argv, argv + argc);
  add_vgpu(app, words, &exit_code);
  words = without_mark(std::move(words));
  try {
    app.parse(std::vector<std::string>(words.rbegin(), words.rend() - 1));
  } catch (const CLI::Success& success) {
    return app.exit(success);
  } catch (const CLI::ParseError& error) {
    std::string command = "tandem";
    for (const CLI::App* chosen : app.get_subcommands()) command += " " + chosen->get_name();
    std::fprintf(stderr, "tandem: %s; see %s --help\n", error.what(), command.c_str());
    return 2;
  }
  return exit_code;
}
