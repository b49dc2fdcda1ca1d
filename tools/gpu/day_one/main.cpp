// day_one <experiment> [--device D] [--plant FAULT] [--scale X] [--shapes FILE]: one experiment of
// tools/gpu/day_one.sh. The last line of the output is the sentence of the page. Exit code: 0 ok, 1 failed, 3 measured,
// 77 not applicable.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <stdexcept>

#include "lab.h"

namespace tandem::day_one {
namespace {

Setup read_setup(int argc, char** argv) {
  Setup setup;
  for (int n = 2; n < argc; n += 2) {
    const std::string flag = argv[n];
    if (n + 1 == argc) throw std::invalid_argument("the flag (" + flag + ") must have a value: write one after it");
    const std::string value = argv[n + 1];
    if (flag == "--device") {
      setup.device = value;
    } else if (flag == "--plant") {
      setup.plant = value;
    } else if (flag == "--scale") {
      setup.scale = std::atof(value.c_str());
    } else if (flag == "--shapes") {
      setup.shapes = value;
    } else {
      throw std::invalid_argument("the flag (" + flag + ") must be --device, --plant, --scale or --shapes: correct it");
    }
  }
  return setup;
}

int run(int argc, char** argv) {
  std::vector<Experiment> all = tensor_core_experiments();
  for (const auto& more : {machine_experiments(), call_experiments()}) all.insert(all.end(), more.begin(), more.end());
  for (const Experiment& experiment : all) {
    if (argc < 2 || std::strcmp(experiment.name, argv[1]) != 0) continue;
    Lab lab(read_setup(argc, argv));
    const Outcome outcome = experiment.run(lab);
    std::printf("%s\n", outcome.text.c_str());
    constexpr int kCodes[] = {0, 1, 3, 77};
    return kCodes[static_cast<int>(outcome.verdict)];
  }
  std::string names;
  for (const Experiment& experiment : all) names += std::string(names.empty() ? "" : ", ") + experiment.name;
  throw std::invalid_argument("the experiment must be one of " + names + ": pass one of them");
}

}  // namespace
}  // namespace tandem::day_one

int main(int argc, char** argv) {
  try {
    return tandem::day_one::run(argc, argv);
  } catch (const std::invalid_argument& error) {
    std::printf("%s\n", error.what());
    return 2;
  } catch (const std::exception& error) {
    std::printf("%s\n", error.what());
    return 1;
  }
}
