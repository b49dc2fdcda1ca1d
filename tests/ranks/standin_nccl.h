// A stand-in for libnccl.so.2: ranks are threads of one process, and buffers are host memory. Messages travel when a
// group ends. A rank that does not answer in time becomes the asynchronous error of the waiting communicator.
#pragma once

#include <cstddef>

extern "C" {

// Communicators of `count` ranks. devices may be null.
int ncclCommInitAll(void** comms, int count, const int* devices);
int ncclCommDestroy(void* comm);

// Plants faults in one communicator.
struct StandinFaults {
  int async_error = 0;         // ncclCommGetAsyncError reports it
  int send_error = 0;          // ncclSend returns it
  int milliseconds = 100'000;  // until a message is late
  int polls_in_progress = 0;   // after ncclGroupEnd
};
void standin_nccl_plant(void* comm, const StandinFaults* faults);
// The number of open groups of the calling thread.
int standin_nccl_groups();
}
