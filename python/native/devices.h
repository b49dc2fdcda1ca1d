/* One context for each GPU, made when it is first asked for and kept for good. */
#ifndef TANDEM_PYTHON_DEVICES_H_
#define TANDEM_PYTHON_DEVICES_H_

#include <tandem/tandem.h>

enum { kMaxDevices = 128 }; /* more than torch serves */

/* The context of "cuda:index", 0 <= index < kMaxDevices, or NULL before it has been opened. */
tandem_context* tandem_python_gpu(int32_t index);

/* Makes that context. From any thread, any number of times. */
tandem_status tandem_python_open_gpu(int32_t index);

/* The workspace that calls on that GPU are known to want; a call that wants more raises it. */
size_t tandem_python_gpu_workspace(int32_t index);
void tandem_python_gpu_wants(int32_t index, size_t bytes);

#endif
