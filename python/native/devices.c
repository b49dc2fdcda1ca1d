#include "devices.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>

static struct {
  _Atomic(tandem_context*) context;
  atomic_size_t workspace;
} gpus[kMaxDevices];

tandem_context* tandem_python_gpu(int32_t index) { return atomic_load(&gpus[index].context); }

tandem_status tandem_python_open_gpu(int32_t index) {
  static pthread_mutex_t opening = PTHREAD_MUTEX_INITIALIZER;
  tandem_status status = TANDEM_OK;
  pthread_mutex_lock(&opening);
  if (tandem_python_gpu(index) == NULL) {
    char device[16];
    snprintf(device, sizeof device, "cuda:%d", (int)index);
    tandem_context_options options = {.size = sizeof options, .device = device};
    tandem_context* context = NULL;
    status = tandem_context_create(&options, &context);
    atomic_store(&gpus[index].context, context);
  }
  pthread_mutex_unlock(&opening);
  return status;
}

size_t tandem_python_gpu_workspace(int32_t index) { return atomic_load(&gpus[index].workspace); }

void tandem_python_gpu_wants(int32_t index, size_t bytes) {
  size_t known = tandem_python_gpu_workspace(index);
  while (known < bytes && !atomic_compare_exchange_weak(&gpus[index].workspace, &known, bytes)) {
  }
}
