// Compares block masks that a GPU computes with brute force.
#include "kernels/on_gpu.h"
#include "support/blocks_case.h"

namespace tandem::test {
namespace {

void make_on(const Gpu& gpu, BlocksInstance& instance) {
  tandem_block_mask_args args = instance.args();
  DeviceCopies copies(gpu, instance.tensors());
  std::vector<tandem_mod_tensor> named(args.mask_mod->tensors, args.mask_mod->tensors + args.mask_mod->tensor_count);
  for (tandem_mod_tensor& one : named) one.tensor = copies.of(one.tensor);
  tandem_mod mod = *args.mask_mod;
  mod.tensors = named.data();
  args.mask_mod = &mod;
  for (const tandem_tensor** result :
       {&args.kv_num_blocks, &args.kv_indices, &args.full_kv_num_blocks, &args.full_kv_indices, &args.q_num_blocks,
        &args.q_indices, &args.full_q_num_blocks, &args.full_q_indices})
    *result = copies.of(*result);
  const auto bytes = static_cast<size_t>(instance.blocks());
  const DeviceMemory workspace(gpu.device(), bytes + 1);
  if (tandem_make_block_mask(gpu.context(), &args, workspace.at(0), bytes, gpu.stream()) != TANDEM_OK)
    throw std::runtime_error(tandem_last_error());
  copies.fetch();
}

std::string judged(const BlocksCase& c) {
  try {
    return check_blocks_accuracy(c, [](BlocksInstance& instance) { make_on(*the_gpu(), instance); });
  } catch (const std::exception& error) {
    return error.what();
  }
}

TEST(KernelsMakeBlocks, ByBruteForce) {
  for (const BlocksCase& c : blocks_cases()) EXPECT_EQ(judged(c), "") << c;
}

}  // namespace
}  // namespace tandem::test
