#define _GNU_SOURCE
#include "threads.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stddef.h>

/* GCC's entry point of a parallel region; Clang's and Intel's runtimes have it too. */
typedef void (*gomp_parallel_function)(void (*body)(void*), void* data, unsigned threads, unsigned flags);
typedef int (*omp_query)(void);

static gomp_parallel_function gomp_parallel;
static omp_query omp_get_max_threads_of_host, omp_in_parallel_of_host;
static atomic_int in_use;
static atomic_int forked; /* OpenMP's threads end at a fork, unknown to its runtime */

enum { kMaxThreads = 1024 };
static _Atomic(tandem_context*) contexts[2][kMaxThreads + 1]; /* [forked][threads] */

typedef struct {
  void (*body)(void*, int32_t);
  void* data;
  int32_t tasks;
  atomic_int next;
} Region;

static void work(void* shared) {
  Region* region = shared;
  for (int32_t task; (task = atomic_fetch_add(&region->next, 1)) < region->tasks;) region->body(region->data, task);
}

static void parallel_for(void* unused, int32_t tasks, void (*body)(void*, int32_t), void* data) {
  (void)unused;
  Region region = {.body = body, .data = data, .tasks = tasks, .next = 0};
  int threads = omp_in_parallel_of_host() ? 1 : omp_get_max_threads_of_host();
  if (threads > tasks) threads = tasks;
  if (threads <= 1) {
    work(&region);
  } else {
    gomp_parallel(work, &region, (unsigned)threads, 0);
  }
}

static void after_fork(void) { atomic_store(&forked, 1); }

int tandem_python_use_openmp_of(const char* library) {
  if (atomic_load(&in_use)) return 1;
  void* handle = dlopen(library, RTLD_LAZY | RTLD_NOLOAD); /* dlsym then searches the library's dependencies, too */
  if (handle == NULL) return 0;
  *(void**)&gomp_parallel = dlsym(handle, "GOMP_parallel");
  *(void**)&omp_get_max_threads_of_host = dlsym(handle, "omp_get_max_threads");
  *(void**)&omp_in_parallel_of_host = dlsym(handle, "omp_in_parallel");
  if (!gomp_parallel || !omp_get_max_threads_of_host || !omp_in_parallel_of_host) return 0;
  pthread_atfork(NULL, NULL, after_fork);
  atomic_store(&in_use, 1);
  return 1;
}

tandem_context* tandem_python_context(void) {
  if (!atomic_load(&in_use)) return NULL;
  int threads = omp_get_max_threads_of_host(); /* torch.set_num_threads changes this number */
  if (threads > kMaxThreads) threads = kMaxThreads;
  if (threads < 1) threads = 1;
  const int own = atomic_load(&forked);
  tandem_context* context = atomic_load(&contexts[own][threads]);
  if (context != NULL) return context;
  tandem_context_options options = {
      .size = sizeof options, .threads = threads, .parallel_for = own ? NULL : parallel_for};
  if (tandem_context_create(&options, &context) != TANDEM_OK) return NULL;
  tandem_context* first = NULL;
  if (!atomic_compare_exchange_strong(&contexts[own][threads], &first, context)) {
    tandem_context_destroy(context);
    context = first;
  }
  return context;
}
