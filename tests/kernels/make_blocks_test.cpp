// Block masks made on a GPU, against brute force.
#include "kernels/on_gpu.h"
#include "support/blocks_case.h"

namespace tandem::test {
namespace {

void make_on(const Gpu& gpu, BlocksInstance& instance) {
  tandem_block_mask_args args = instance.args();
  std::vector<DeviceMemory> memories;
  std::vector<tandem_tensor> handles;
  const std::vector<Tensor*> tensors = instance.tensors();
  handles.reserve(tensors.size());
  for (Tensor* tensor : tensors) {
    const std::span<const std::byte> bytes = tensor->storage();
    memories.emplace_back(gpu.device(), bytes.size());
    require(gpu.device().copy_to_device(memories.back().at(0), bytes.data(), bytes.size(), gpu.stream()));
    handles.push_back(*tensor->describe());
    handles.back().data = memories.back().at(0);
    handles.back().device = gpu.where();
  }
  const auto move = [&](const tandem_tensor*& host) {
    for (size_t n = 0; n < tensors.size(); ++n) {
      if (host == nullptr || tensors[n]->describe() != host) continue;
      host = &handles[n];
      return;
    }
  };
  std::vector<tandem_mod_tensor> named(args.mask_mod->tensors, args.mask_mod->tensors + args.mask_mod->tensor_count);
  for (tandem_mod_tensor& one : named) move(one.tensor);
  tandem_mod mod = *args.mask_mod;
  mod.tensors = named.data();
  args.mask_mod = &mod;
  for (const tandem_tensor** result :
       {&args.kv_num_blocks, &args.kv_indices, &args.full_kv_num_blocks, &args.full_kv_indices, &args.q_num_blocks,
        &args.q_indices, &args.full_q_num_blocks, &args.full_q_indices})
    move(*result);
  const auto bytes = static_cast<size_t>(instance.blocks());
  const DeviceMemory workspace(gpu.device(), bytes + 1);
  require(gpu.device().synchronize(gpu.stream()));
  if (tandem_make_block_mask(gpu.context(), &args, workspace.at(0), bytes, gpu.stream()) != TANDEM_OK)
    throw std::runtime_error(tandem_last_error());
  for (size_t n = 0; n < tensors.size(); ++n) {
    const std::span<std::byte> storage = tensors[n]->storage();
    require(gpu.device().copy_to_host(storage.data(), memories[n].at(0), storage.size(), gpu.stream()));
  }
  require(gpu.device().synchronize(gpu.stream()));
}

std::string judged(const BlocksCase& c) {
  try {
    return judge_blocks(c, [](BlocksInstance& instance) { make_on(*the_gpu(), instance); });
  } catch (const std::exception& error) {
    return error.what();
  }
}

TEST(KernelsMakeBlocks, ByBruteForce) {
  for (const BlocksCase& c : blocks_cases()) EXPECT_EQ(judged(c), "") << c;
}

}  // namespace
}  // namespace tandem::test
