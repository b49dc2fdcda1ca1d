// The part of NCCL that the transport uses, found in libnccl.so.2 at run time. The declarations follow nccl.h of NCCL
// 2.14 (github.com/NVIDIA/nccl, src/nccl.h.in) and are repeated here so that a build needs no NCCL.
#pragma once

#include <cstddef>
#include <string>

#include "base/status.h"

namespace tandem::context_parallel {

using NcclComm = void*;    // ncclComm_t
using NcclStream = void*;  // cudaStream_t

enum NcclResult : int { kNcclSuccess = 0, kNcclInProgress = 7 };
enum NcclType : int { kNcclInt8 = 0 };

#define TANDEM_NCCL_FUNCTIONS(F)                                                                                     \
  F(int, ncclGroupStart, ())                                                                                         \
  F(int, ncclGroupEnd, ())                                                                                           \
  F(int, ncclSend, (const void* data, size_t count, int type, int peer, NcclComm comm, NcclStream stream))           \
  F(int, ncclRecv, (void* data, size_t count, int type, int peer, NcclComm comm, NcclStream stream))                 \
  F(int, ncclAllGather, (const void* send, void* receive, size_t count, int type, NcclComm comm, NcclStream stream)) \
  F(int, ncclCommCount, (NcclComm comm, int* count))                                                                 \
  F(int, ncclCommUserRank, (NcclComm comm, int* rank))                                                               \
  F(int, ncclCommCuDevice, (NcclComm comm, int* device))                                                             \
  F(int, ncclCommGetAsyncError, (NcclComm comm, int* result))                                                        \
  F(const char*, ncclGetErrorString, (int result))                                                                   \
  F(const char*, ncclGetLastError, (NcclComm comm))

struct NcclLibrary {
#define TANDEM_DECLARE(result, name, parameters) result(*name) parameters = nullptr;  // NOLINT(*-macro-parentheses)
  TANDEM_NCCL_FUNCTIONS(TANDEM_DECLARE)
#undef TANDEM_DECLARE
};

// Fills in the functions, or returns the reason why a function is missing. The library is never unloaded, because NCCL
// has threads.
Status load_nccl(const std::string& name, NcclLibrary* library);

}  // namespace tandem::context_parallel
