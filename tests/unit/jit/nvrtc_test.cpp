// The places where NVRTC is searched, and their order.
#include "jit/nvrtc.h"

#include <gtest/gtest.h>

#include "unit/jit/temporary.h"

namespace tandem::test {
namespace {

using Paths = std::vector<std::string>;

class NvrtcSearch : public testing::Test {
 protected:
  std::string library(const std::string& path) {
    write_file(folder / path, "");
    return folder / path;
  }
  // Ignores /usr/local/cuda of this machine.
  static Paths found(const jit::Search& search, const Env& env) {
    Paths paths = jit::nvrtc_candidates(search, env);
    std::erase_if(paths, [](const std::string& path) { return path.starts_with("/usr/local/cuda"); });
    return paths;
  }

  TemporaryFolder folder;
};

TEST_F(NvrtcSearch, TheVariableAloneCounts) {
  library("site/nvidia/cu13/lib/libnvrtc.so.13");
  Env env;
  env.nvrtc = "/some/libnvrtc.so";
  EXPECT_EQ(jit::nvrtc_candidates({{folder / "site"}, 0}, env), Paths{"/some/libnvrtc.so"});
}

TEST_F(NvrtcSearch, OrderOfPlaces) {
  const std::string given = library("site/nvidia/cuda_nvrtc/lib/libnvrtc.so.12");
  const std::string virtual_env = library("venv/lib/python3.11/site-packages/nvidia/cu13/lib/libnvrtc.so.13");
  const std::string conda_pip = library("conda/lib/python3.12/site-packages/nvidia/cu13/lib/libnvrtc.so.13");
  const std::string conda = library("conda/lib/libnvrtc.so.12");
  const std::string toolkit = library("cuda/lib64/libnvrtc.so.12");
  Env env;
  env.virtual_env = folder / "venv";
  env.conda_prefix = folder / "conda";
  env.cuda_home = folder / "cuda";
  EXPECT_EQ(found({{folder / "site"}, 0}, env),
            (Paths{given, virtual_env, conda_pip, conda, toolkit, "libnvrtc.so.13", "libnvrtc.so.12"}));
}

TEST_F(NvrtcSearch, NearTheCommandOrLibrary) {
  const std::string next_to_it = library("venv/bin/libnvrtc.so.12");
  const std::string environment = library("venv/lib/python3.12/site-packages/nvidia/cu13/lib/libnvrtc.so.13");
  EXPECT_EQ(found({{}, 0, folder / "venv/bin"}, {}),
            (Paths{next_to_it, environment, "libnvrtc.so.13", "libnvrtc.so.12"}));
  EXPECT_EQ(found({{}, 0, folder / "venv/lib/python3.12/site-packages/tandem"}, {}),
            (Paths{environment, "libnvrtc.so.13", "libnvrtc.so.12"}));
  const std::string build_tree = library("build/nvrtc/lib/python3.11/site-packages/nvidia/cu13/lib/libnvrtc.so.13");
  for (const char* own : {"build/release", "build/release/src"})
    EXPECT_EQ(found({{}, 0, folder / own}, {}), (Paths{build_tree, "libnvrtc.so.13", "libnvrtc.so.12"}));
  Env env;
  env.virtual_env = folder / "venv";  // the environment comes first
  EXPECT_EQ(found({{}, 0, folder / "build/release"}, env),
            (Paths{environment, build_tree, "libnvrtc.so.13", "libnvrtc.so.12"}));
}

TEST_F(NvrtcSearch, NewestFirstAndOnlyLibraries) {
  const std::string cu12 = library("site/nvidia/cuda_nvrtc/lib/libnvrtc.so.12");
  const std::string cu13 = library("site/nvidia/cu13/lib/libnvrtc.so.13");
  const std::string cu14 = library("site/nvidia/cu14/lib/libnvrtc.so.14");
  for (const char* name : {"libnvrtc.so", "libnvrtc.so.11", "libnvrtc.so.13.0.88", "libnvrtc.alt.so.13",
                           "libnvrtc.so.x", "libnvrtc-builtins.so.13.0"}) {
    library(std::string("site/nvidia/cu13/lib/") + name);
  }
  EXPECT_EQ(found({{folder / "site"}, 0}, {}), (Paths{cu14, cu13, cu12, "libnvrtc.so.13", "libnvrtc.so.12"}));
  EXPECT_EQ(found({{folder / "site"}, 13}, {}), (Paths{cu13, cu12, "libnvrtc.so.13", "libnvrtc.so.12"}));
  EXPECT_EQ(found({{folder / "site"}, 12}, {}), (Paths{cu12, "libnvrtc.so.12"}));
}

TEST_F(NvrtcSearch, AbsentFoldersAreNothing) {
  Env env;
  env.virtual_env = folder / "absent";
  env.conda_prefix = folder / "absent";
  env.cuda_home = folder / "absent";
  EXPECT_EQ(found({{folder / "absent"}, 0}, env), (Paths{"libnvrtc.so.13", "libnvrtc.so.12"}));
}

TEST_F(NvrtcSearch, LoadingReportsTheError) {
  jit::Nvrtc nvrtc;
  EXPECT_EQ(jit::load_nvrtc(FAKE_NVRTC, &nvrtc), "");
  EXPECT_NE(jit::load_nvrtc("libm.so.6", &nvrtc).find("nvrtcVersion"), std::string::npos);
  EXPECT_NE(jit::load_nvrtc(library("libnvrtc.so.13"), &nvrtc).find("libnvrtc.so.13"), std::string::npos);
}

}  // namespace
}  // namespace tandem::test
