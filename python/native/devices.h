/* One context for each GPU, created at its first use and never destroyed. */
#ifndef TANDEM_PYTHON_DEVICES_H_
#define TANDEM_PYTHON_DEVICES_H_

#include <tandem/tandem.h>

enum { kMaxDevices = 128 }; /* more than torch serves */

/* The context of "cuda:index", 0 <= index < kMaxDevices, or NULL before it has been opened. */
tandem_context* tandem_python_gpu(int32_t index);

/* Creates that context. Any thread may call this function, any number of times. */
tandem_status tandem_python_open_gpu(int32_t index);

/* The largest workspace that calls on that GPU have needed. */
size_t tandem_python_gpu_workspace(int32_t index);
void tandem_python_gpu_wants(int32_t index, size_t bytes);

#endif
