// What each program of a sanitized build asks of the sanitizers' library at its start.
//
// Up to LLVM 16 and GCC 13 that library takes a thread's variables in a shared library that was loaded late for a block
// of glibc 2.19 wherever they happen to begin 16 bytes into a page, and the two words before them for their address and
// length. Those words are the allocator's, so that the leak check at exit reads at an address like 0x90 and dies
// ("Tracer caught signal 11"; google/sanitizers 1322). Nothing is lost by not looking: with a newer glibc nothing else
// comes of it, and the leak check reads such blocks anyway, as memory of the loader's.
const char* __asan_default_options(void);
const char* __asan_default_options(void) { return "intercept_tls_get_addr=0"; }
const char* __tsan_default_options(void);
const char* __tsan_default_options(void) { return "intercept_tls_get_addr=0"; }
