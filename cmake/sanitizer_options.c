// Default options of the sanitizers' library in every program of a sanitized build.
//
// Up to LLVM 16 and GCC 13 the library may mistake the thread variables of a shared library for a block of glibc 2.19.
// This happens where they begin 16 bytes into a page. The library then reads two words of the allocator as an address
// and a length. The leak check at exit fails ("Tracer caught signal 11"; google/sanitizers 1322). A newer glibc
// does not need the interception, because the leak check reads such blocks as memory of the loader.
//
// GCC's fake stack may align a frame to less than 64 bytes (GCC PR 110027). A store of 64 bytes then faults, so GCC
// builds keep the real stack. GCC 13 is the first version whose library uses the fake stack by default.
const char* __asan_default_options(void);
const char* __asan_default_options(void) {
#ifdef __clang__
  return "intercept_tls_get_addr=0";
#else
  return "intercept_tls_get_addr=0:detect_stack_use_after_return=0";
#endif
}
const char* __tsan_default_options(void);
const char* __tsan_default_options(void) { return "intercept_tls_get_addr=0"; }
