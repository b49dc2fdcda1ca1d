/* The threads that run the calls of this process. */
#ifndef TANDEM_PYTHON_THREADS_H_
#define TANDEM_PYTHON_THREADS_H_

#include <tandem/tandem.h>

/* From now on calls run on the OpenMP threads that this loaded library (torch's libtorch_cpu.so) computes with, so that
 * one set of threads serves both. Returns 1, or 0 if no such library is loaded or its OpenMP is unknown. */
TANDEM_API int tandem_python_use_openmp_of(const char* library);

/* The context for a call of this thread: NULL, the process default, until an OpenMP runtime is in use. */
TANDEM_API tandem_context* tandem_python_context(void);

#endif
