// Functions, occupancy and launches. A launch is complete when its call returns.
#include <algorithm>
#include <cstring>
#include <limits>

#include "vgpu/src/driver/state.h"

namespace tandem::vgpu::driver {
namespace {

constexpr int kPortableCluster = 8;

int arch_of(const DriverState& state) { return 10 * state.model().compute_major + state.model().compute_minor; }

CUresult read_attribute(DriverState& state, int* value, int attribute, const CudaFunction& function) {
  const gpu::KernelAttributes& known = function.attributes;
  switch (attribute) {
    case kMaxThreadsPerBlock: *value = known.max_threads; break;
    case kSharedSizeBytes: *value = known.static_smem_bytes; break;
    case kConstSizeBytes: *value = 0; break;
    case kLocalSizeBytes: *value = known.local_bytes; break;
    case kNumRegs: *value = known.registers; break;
    case kPtxVersion:
    case kBinaryVersion: *value = arch_of(state); break;
    case kCacheModeCa: *value = 0; break;
    case kMaxDynamicSharedSizeBytes: *value = function.max_dynamic_bytes; break;
    case kPreferredSharedMemoryCarveout: *value = function.carveout; break;
    case kClusterSizeMustBeSet:
      *value = function.program().function().explicit_cluster && function.cluster[0] == 0;
      break;
    case kRequiredClusterWidth:
    case kRequiredClusterHeight:
    case kRequiredClusterDepth: *value = function.cluster[attribute - kRequiredClusterWidth]; break;
    case kNonPortableClusterSizeAllowed: *value = function.non_portable_cluster; break;
    case kClusterSchedulingPolicyPreference: *value = function.cluster_policy; break;
    default: return kInvalidValue;
  }
  return kSuccess;
}

CUresult set_attribute(DriverState& state, CudaFunction* function, int attribute, int value) {
  switch (attribute) {
    case kMaxDynamicSharedSizeBytes:
      if (value < 0 || value > state.model().shared_bytes_per_block - function->attributes.static_smem_bytes)
        return kInvalidValue;
      function->max_dynamic_bytes = value;
      break;
    case kPreferredSharedMemoryCarveout: function->carveout = value; break;
    case kRequiredClusterWidth:
    case kRequiredClusterHeight:
    case kRequiredClusterDepth:
      if (value < 0) return kInvalidValue;
      function->cluster[attribute - kRequiredClusterWidth] = value;
      break;
    case kNonPortableClusterSizeAllowed: function->non_portable_cluster = value != 0; break;
    case kClusterSchedulingPolicyPreference: function->cluster_policy = value; break;
    default: return kInvalidValue;
  }
  return kSuccess;
}

CUresult get(const char* name, int* value, int attribute, CudaFunction* function) {
  return serve(name, Needs::context, [&](DriverState& state) {
    if (value == nullptr) return kInvalidValue;
    const std::lock_guard lock(state.mutex);
    return state.functions.contains(function) ? read_attribute(state, value, attribute, *function) : kInvalidHandle;
  });
}

CUresult set(const char* name, int attribute, int value, CudaFunction* function) {
  return serve(name, Needs::context, [&](DriverState& state) {
    const std::lock_guard lock(state.mutex);
    return state.functions.contains(function) ? set_attribute(state, function, attribute, value) : kInvalidHandle;
  });
}

// The number of blocks of this size that an SM holds at once.
int blocks_per_sm(const Model& model, const CudaFunction& function, int threads, size_t dynamic_bytes) {
  const int warps = (threads + 31) / 32;
  const auto shared = dynamic_bytes + static_cast<size_t>(function.attributes.static_smem_bytes) + kReservedSharedBytes;
  if (threads < 1 || threads > function.attributes.max_threads ||
      shared > static_cast<size_t>(model.shared_bytes_per_block) + kReservedSharedBytes)
    return 0;
  const int registers = (std::max(function.attributes.registers, 1) + 7) / 8 * 8 * warps * 32;
  const int by_shared = static_cast<int>((static_cast<size_t>(model.shared_bytes_per_block) + kReservedSharedBytes) /
                                         ((shared + 127) / 128 * 128));
  return std::min({kBlocksPerSm, kThreadsPerSm / (warps * 32), by_shared, model.registers_per_sm / registers});
}

// ---- launches ----

struct Wanted {
  LaunchConfig config;
  gpu::Dim3 cluster;
  bool cooperative = false, overlaps = false;
};

CUresult take_attributes(const char* name, Wanted* wanted) {
  for (unsigned i = 0; i < wanted->config.attribute_count; ++i) {
    const LaunchAttribute& attribute = wanted->config.attributes[i];
    const auto& cluster = attribute.value.cluster;
    switch (attribute.id) {
      case LaunchAttribute::cluster_dimension: wanted->cluster = {cluster.x, cluster.y, cluster.z}; break;
      case LaunchAttribute::cooperative: wanted->cooperative = attribute.value.flag != 0; break;
      case LaunchAttribute::programmatic_stream_serialization: wanted->overlaps = attribute.value.flag != 0; break;
      case LaunchAttribute::ignore:  // hints, which change no result
      case LaunchAttribute::access_policy_window:
      case LaunchAttribute::synchronization_policy:
      case LaunchAttribute::cluster_scheduling_policy:
      case LaunchAttribute::priority:
      case LaunchAttribute::memory_domain_map:
      case LaunchAttribute::memory_domain:
      case LaunchAttribute::preferred_cluster_dimension:
      case LaunchAttribute::shared_carveout: break;
      default:
        return refuse(
            name, kNotSupported,
            str_cat("launch attribute ", static_cast<unsigned>(attribute.id), " is not served: remove the attribute"));
    }
  }
  return kSuccess;
}

CUresult check_cluster(const char* name, const CudaFunction& function, Wanted* wanted) {
  gpu::Dim3& cluster = wanted->cluster;
  const int32_t* const required = function.cluster;
  if (cluster.x * cluster.y * cluster.z <= 1 && required[0] > 0)
    cluster = {static_cast<uint32_t>(required[0]), static_cast<uint32_t>(std::max(required[1], 1)),
               static_cast<uint32_t>(std::max(required[2], 1))};
  const LaunchConfig& config = wanted->config;
  const uint64_t blocks = uint64_t{cluster.x} * cluster.y * cluster.z;
  if (blocks == 0 || config.grid_x % cluster.x != 0 || config.grid_y % cluster.y != 0 || config.grid_z % cluster.z != 0)
    return refuse(name, kInvalidValue,
                  str_cat("the grid (", config.grid_x, ", ", config.grid_y, ", ", config.grid_z,
                          ") must be a multiple of the cluster (", cluster.x, ", ", cluster.y, ", ", cluster.z,
                          "): correct the grid"));
  if (blocks > kPortableCluster && !function.non_portable_cluster)
    return refuse(name, kInvalidClusterSize,
                  str_cat("a cluster of ", blocks, " blocks is beyond the ", kPortableCluster,
                          " that every GPU has: set ", "CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED first"));
  return kSuccess;
}

CUresult check_launch(const char* name, const DriverState& state, const CudaFunction& function, const Wanted& wanted) {
  const LaunchConfig& c = wanted.config;
  const uint64_t threads = uint64_t{c.block_x} * c.block_y * c.block_z;
  if (c.grid_x == 0 || c.grid_y == 0 || c.grid_z == 0 || threads == 0 || c.grid_y > 65535 || c.grid_z > 65535 ||
      c.block_x > 1024 || c.block_y > 1024 || c.block_z > 64)
    return refuse(
        name, kInvalidValue,
        str_cat("the grid (", c.grid_x, ", ", c.grid_y, ", ", c.grid_z, ") of blocks (", c.block_x, ", ", c.block_y,
                ", ", c.block_z, ") must be nonempty and within the limits of CUDA: correct the launch"));
  if (threads > static_cast<uint64_t>(function.attributes.max_threads))
    return refuse(name, threads > 1024 ? kInvalidValue : kLaunchOutOfResources,
                  str_cat(threads, " threads in a block are beyond the ", function.attributes.max_threads,
                          " that kernel \"", function.name, "\" is compiled for: launch fewer threads"));
  if (c.shared_bytes > static_cast<unsigned>(function.max_dynamic_bytes))
    return refuse(
        name, kInvalidValue,
        str_cat(c.shared_bytes, " bytes of dynamic shared memory must be at most the ", function.max_dynamic_bytes,
                " of kernel \"", function.name, "\": set CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES first"));
  const auto resident =
      static_cast<uint64_t>(state.model().sm_count) *
      static_cast<uint64_t>(blocks_per_sm(state.model(), function, static_cast<int>(threads), c.shared_bytes));
  if (wanted.cooperative && uint64_t{c.grid_x} * c.grid_y * c.grid_z > resident)
    return refuse(
        name, kCooperativeLaunchTooLarge,
        str_cat("a cooperative launch has at most the ", resident, " blocks that run at once: launch fewer blocks"));
  return kSuccess;
}

// Addresses of parameters: as given, or in the block that `extra` names. False: neither is present.
bool take_parameters(const CudaFunction& function, void** parameters, void** extra, std::vector<void*>* args) {
  const Program& program = function.program();
  const size_t count = program.function().parameters.size();
  if (parameters != nullptr) {
    args->assign(parameters, parameters + count);
  } else if (extra != nullptr) {
    char* block = nullptr;
    for (void** at = extra; *at != nullptr; at += 2)
      if (reinterpret_cast<uintptr_t>(*at) == 1) block = static_cast<char*>(at[1]);  // CU_LAUNCH_PARAM_BUFFER_POINTER
    if (block == nullptr) return count == 0;
    for (size_t i = 0; i < count; ++i) args->push_back(block + program.parameter_offset(static_cast<int>(i)));
  }
  return args->size() == count;
}

// A captured launch keeps the values of its parameters, and is executed without a stream.
Work replay_of(const char* name, Wanted wanted, CudaFunction* function, void* const* parameters);

CUresult launch(const char* name, const Wanted& asked, CudaFunction* function, void** parameters, void** extra) {
  return serve(name, Needs::context, [&](DriverState& state) {
    Wanted wanted = asked;
    gpu::Launch launch;
    std::vector<void*> args;
    const bool captures = is_capturing(asked.config.stream);
    {
      const std::lock_guard lock(state.mutex);
      if (!state.functions.contains(function)) return kInvalidHandle;
      CUresult result = take_attributes(name, &wanted);
      if (result == kSuccess) result = check_cluster(name, *function, &wanted);
      if (result == kSuccess) result = check_launch(name, state, *function, wanted);
      if (result != kSuccess) return result;
      if (!take_parameters(*function, parameters, extra, &args)) return kInvalidValue;
      launch.kernel = function->kernel;
    }
    if (captures)
      return submit(name, wanted.config.stream, GraphNode::kernel, replay_of(name, wanted, function, args.data()));
    const LaunchConfig& c = wanted.config;
    launch.grid = {c.grid_x, c.grid_y, c.grid_z};
    launch.block = {c.block_x, c.block_y, c.block_z};
    launch.cluster = wanted.cluster;
    launch.dynamic_smem_bytes = c.shared_bytes;
    launch.cooperative = wanted.cooperative;
    launch.overlap_previous = wanted.overlaps;
    launch.args = args.data();
    const Status status = state.device().launch(launch);
    CUresult result = state.result_of_last_launch();
    // Findings are printed already; errors without a finding are not.
    if (!status.ok() && status.code != TANDEM_DEVICE_ERROR) result = refuse(name, kInvalidValue, status.message);
    if (result == kSuccess) return kSuccess;
    const std::lock_guard lock(state.mutex);
    if (result != kInvalidValue) state.failure = result;
    return result;
  });
}

Work replay_of(const char* name, Wanted wanted, CudaFunction* function, void* const* parameters) {
  wanted.config.attributes = nullptr;
  wanted.config.attribute_count = 0;
  wanted.config.stream = nullptr;
  return [=, block = keep_parameters(function->program(), parameters)] {
    std::vector<void*> addresses = addresses_of(function->program(), *block);
    return launch(name, wanted, function, addresses.data(), nullptr);
  };
}

CUresult occupancy(const char* name, int* blocks, CudaFunction* function, int threads, size_t dynamic_bytes) {
  return serve(name, Needs::context, [&](DriverState& state) {
    if (blocks == nullptr) return kInvalidValue;
    const std::lock_guard lock(state.mutex);
    if (!state.functions.contains(function)) return kInvalidHandle;
    *blocks = blocks_per_sm(state.model(), *function, threads, dynamic_bytes);
    return kSuccess;
  });
}

using BytesOfBlock = size_t(int threads);

CUresult best_block(const char* name, int* grid, int* block, CudaFunction* function, BytesOfBlock* bytes_of,
                    size_t dynamic_bytes, int most) {
  return serve(name, Needs::context, [&](DriverState& state) {
    if (grid == nullptr || block == nullptr) return kInvalidValue;
    const std::lock_guard lock(state.mutex);
    if (!state.functions.contains(function)) return kInvalidHandle;
    int best = 0, best_blocks = 0;
    most = std::min(most > 0 ? most : 1024, function->attributes.max_threads);
    for (int threads = most / 32 * 32; threads >= 32; threads -= 32) {
      const size_t bytes = bytes_of != nullptr ? bytes_of(threads) : dynamic_bytes;
      const int blocks = blocks_per_sm(state.model(), *function, threads, bytes);
      if (blocks * threads > best * best_blocks) best = threads, best_blocks = blocks;
    }
    *block = best;
    *grid = best_blocks * state.model().sm_count;
    return kSuccess;
  });
}

}  // namespace

std::shared_ptr<ParameterBlock> keep_parameters(const Program& program, void* const* parameters) {
  auto block = std::make_shared<ParameterBlock>(static_cast<size_t>(program.parameter_bytes()));
  const ptx::Function& function = program.function();
  for (size_t i = 0; i < function.parameters.size(); ++i) {
    const ptx::Symbol& symbol = function.symbols[static_cast<size_t>(function.parameters[i])];
    std::memcpy(block->data() + program.parameter_offset(static_cast<int>(i)), parameters[i],
                static_cast<size_t>(symbol.bytes()));
  }
  return block;
}

std::vector<void*> addresses_of(const Program& program, ParameterBlock& block) {
  std::vector<void*> addresses;
  for (size_t i = 0; i < program.function().parameters.size(); ++i)
    addresses.push_back(block.data() + program.parameter_offset(static_cast<int>(i)));
  return addresses;
}

TANDEM_DRIVER(cuFuncGetAttribute, (int* value, int attribute, CudaFunction* function)) {
  return get("cuFuncGetAttribute", value, attribute, function);
}
TANDEM_DRIVER(cuFuncSetAttribute, (CudaFunction * function, int attribute, int value)) {
  return set("cuFuncSetAttribute", attribute, value, function);
}
TANDEM_DRIVER(cuKernelGetAttribute, (int* value, int attribute, CudaFunction* kernel, CUdevice)) {
  return get("cuKernelGetAttribute", value, attribute, kernel);
}
TANDEM_DRIVER(cuKernelSetAttribute, (int attribute, int value, CudaFunction* kernel, CUdevice)) {
  return set("cuKernelSetAttribute", attribute, value, kernel);
}
TANDEM_DRIVER(cuFuncSetCacheConfig, (CudaFunction*, int)) {
  return serve("cuFuncSetCacheConfig", Needs::context, [](DriverState&) { return kSuccess; });
}
TANDEM_DRIVER(cuKernelSetCacheConfig, (CudaFunction*, int, CUdevice)) {
  return serve("cuKernelSetCacheConfig", Needs::context, [](DriverState&) { return kSuccess; });
}

TANDEM_DRIVER(cuFuncGetParamInfo, (CudaFunction * function, size_t index, size_t* offset, size_t* bytes)) {
  return serve("cuFuncGetParamInfo", Needs::context, [&](DriverState& state) {
    const std::lock_guard lock(state.mutex);
    if (offset == nullptr || !state.functions.contains(function)) return kInvalidValue;
    const ptx::Function& known = function->program().function();
    if (index >= known.parameters.size()) return kInvalidValue;
    *offset = static_cast<size_t>(function->program().parameter_offset(static_cast<int>(index)));
    if (bytes != nullptr)
      *bytes = static_cast<size_t>(known.symbols[static_cast<size_t>(known.parameters[index])].bytes());
    return kSuccess;
  });
}
TANDEM_DRIVER(cuKernelGetParamInfo, (CudaFunction * kernel, size_t index, size_t* offset, size_t* bytes)) {
  return cuFuncGetParamInfo(kernel, index, offset, bytes);
}

TANDEM_DRIVER(cuOccupancyMaxActiveBlocksPerMultiprocessor,
              (int* blocks, CudaFunction* function, int threads, size_t dynamic_bytes)) {
  return occupancy("cuOccupancyMaxActiveBlocksPerMultiprocessor", blocks, function, threads, dynamic_bytes);
}
TANDEM_DRIVER(cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags,
              (int* blocks, CudaFunction* function, int threads, size_t dynamic_bytes, unsigned)) {
  return occupancy("cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags", blocks, function, threads, dynamic_bytes);
}
TANDEM_DRIVER(cuOccupancyMaxPotentialBlockSize,
              (int* grid, int* block, CudaFunction* function, BytesOfBlock* bytes_of, size_t dynamic_bytes, int most)) {
  return best_block("cuOccupancyMaxPotentialBlockSize", grid, block, function, bytes_of, dynamic_bytes, most);
}
TANDEM_DRIVER(cuOccupancyMaxPotentialBlockSizeWithFlags,
              (int* grid, int* block, CudaFunction* function, BytesOfBlock* bytes_of, size_t dynamic_bytes, int most,
               unsigned)) {
  return best_block("cuOccupancyMaxPotentialBlockSizeWithFlags", grid, block, function, bytes_of, dynamic_bytes, most);
}
TANDEM_DRIVER(cuOccupancyMaxPotentialClusterSize, (int* blocks, CudaFunction* function, const LaunchConfig*)) {
  return serve("cuOccupancyMaxPotentialClusterSize", Needs::context, [&](DriverState& state) {
    const std::lock_guard lock(state.mutex);
    if (blocks == nullptr || !state.functions.contains(function)) return kInvalidValue;
    *blocks = function->non_portable_cluster ? state.model().max_cluster : kPortableCluster;
    return kSuccess;
  });
}
TANDEM_DRIVER(cuOccupancyMaxActiveClusters, (int* clusters, CudaFunction* function, const LaunchConfig* config)) {
  return serve("cuOccupancyMaxActiveClusters", Needs::context, [&](DriverState& state) {
    const std::lock_guard lock(state.mutex);
    if (clusters == nullptr || config == nullptr || !state.functions.contains(function)) return kInvalidValue;
    Wanted wanted{*config, {}, false, false};
    CUresult result = take_attributes("cuOccupancyMaxActiveClusters", &wanted);
    if (result == kSuccess) result = check_cluster("cuOccupancyMaxActiveClusters", *function, &wanted);
    if (result != kSuccess) return result;
    const auto threads = static_cast<int>(config->block_x * config->block_y * config->block_z);
    const int blocks = blocks_per_sm(state.model(), *function, threads, config->shared_bytes) * state.model().sm_count;
    *clusters = blocks / static_cast<int>(wanted.cluster.x * wanted.cluster.y * wanted.cluster.z);
    return kSuccess;
  });
}

TANDEM_DRIVER(cuLaunchKernel, (CudaFunction * function, unsigned grid_x, unsigned grid_y, unsigned grid_z,
                               unsigned block_x, unsigned block_y, unsigned block_z, unsigned shared_bytes,
                               void* stream, void** parameters, void** extra)) {
  const LaunchConfig config{grid_x, grid_y, grid_z, block_x, block_y, block_z, shared_bytes, stream, nullptr, 0};
  return launch("cuLaunchKernel", {config, {}, false, false}, function, parameters, extra);
}
TANDEM_DRIVER(cuLaunchKernelEx, (const LaunchConfig* config, CudaFunction* function, void** parameters, void** extra)) {
  if (config == nullptr || (config->attribute_count > 0 && config->attributes == nullptr)) return kInvalidValue;
  return launch("cuLaunchKernelEx", {*config, {}, false, false}, function, parameters, extra);
}
TANDEM_DRIVER(cuLaunchCooperativeKernel,
              (CudaFunction * function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,
               unsigned block_y, unsigned block_z, unsigned shared_bytes, void* stream, void** parameters)) {
  const LaunchConfig config{grid_x, grid_y, grid_z, block_x, block_y, block_z, shared_bytes, stream, nullptr, 0};
  return launch("cuLaunchCooperativeKernel", {config, {}, true, false}, function, parameters, nullptr);
}
TANDEM_DRIVER(cuLaunchHostFunc, (void* stream, void (*function)(void*), void* data)) {
  return serve("cuLaunchHostFunc", Needs::context, [&](DriverState&) {
    if (function == nullptr) return kInvalidValue;
    return submit("cuLaunchHostFunc", stream, GraphNode::host, [=] { return function(data), kSuccess; });
  });
}

TANDEM_DRIVER(cuTensorMapEncodeTiled,
              (void* map, int type, uint32_t rank, void* address, const uint64_t* dims, const uint64_t* byte_strides,
               const uint32_t* box, const uint32_t* element_strides, int interleave, int swizzle, int promotion,
               int fill)) {
  constexpr const char* name = "cuTensorMapEncodeTiled";
  return serve(name, Needs::device, [&](DriverState& state) {
    if (map == nullptr || dims == nullptr || box == nullptr || element_strides == nullptr || rank < 1 ||
        rank > gpu::kMaxTensorRank || (rank > 1 && byte_strides == nullptr))
      return refuse(name, kInvalidValue,
                    str_cat("rank (", rank, ") must be 1 to 5, and no array NULL: pass all arrays"));
    if (interleave != 0)
      return refuse(name, kNotSupported, "interleaved layouts are not modelled: use CU_TENSOR_MAP_INTERLEAVE_NONE");
    if (reinterpret_cast<uintptr_t>(map) % 64 != 0)
      return refuse(name, kInvalidValue, "the address of the map must be a multiple of 64: align the map");
    gpu::TensorMapSpec spec;
    spec.address = address;
    spec.type = static_cast<gpu::TensorType>(type);
    spec.rank = static_cast<int32_t>(rank);
    std::copy_n(dims, rank, spec.dims);
    if (rank > 1) std::copy_n(byte_strides, rank - 1, spec.byte_strides + 1);
    std::copy_n(box, rank, spec.box);
    std::copy_n(element_strides, rank, spec.element_strides);
    spec.swizzle = static_cast<gpu::Swizzle>(swizzle);
    spec.l2_promotion = static_cast<gpu::L2Promotion>(promotion);
    spec.oob_fill = static_cast<gpu::OobFill>(fill);
    gpu::TensorMap made;
    const CUresult result = result_of(name, state.device().encode(spec, &made));
    if (result == kSuccess) std::memcpy(map, &made, sizeof made);
    return result;
  });
}

TANDEM_DRIVER_ALIAS(cuLaunchKernel_ptsz, cuLaunchKernel);
TANDEM_DRIVER_ALIAS(cuLaunchKernelEx_ptsz, cuLaunchKernelEx);
TANDEM_DRIVER_ALIAS(cuLaunchCooperativeKernel_ptsz, cuLaunchCooperativeKernel);
TANDEM_DRIVER_ALIAS(cuLaunchHostFunc_ptsz, cuLaunchHostFunc);

}  // namespace tandem::vgpu::driver
