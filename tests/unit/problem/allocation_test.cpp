// A valid call allocates no memory: make_problem() allocates only for its messages.
#include <gtest/gtest.h>

#include <cstdlib>
#include <new>

#include "unit/problem/call.h"

namespace {
thread_local int64_t allocations = 0;
}

// These functions are not inlined, because GCC would see one function of the pair without the other, and warn.
[[gnu::noinline]] void* operator new(size_t bytes) {
  ++allocations;
  if (void* memory = std::malloc(bytes ? bytes : 1)) return memory;
  throw std::bad_alloc();
}
[[gnu::noinline]] void operator delete(void* memory) noexcept { std::free(memory); }
[[gnu::noinline]] void operator delete(void* memory, size_t) noexcept { std::free(memory); }

namespace tandem::test {
namespace {

TEST(Allocation, NoneForAValidCall) {
  for (const auto base : {&Call::dense, &Call::packed, &Call::paged}) {
    Call call;
    (call.*base)();
    call.pass = base == &Call::paged ? TANDEM_FORWARD : TANDEM_BACKWARD;
    Problem problem;
    const int64_t before = allocations;
    const Status status = call.make(&problem);
    EXPECT_EQ(allocations, before);
    ASSERT_TRUE(status.ok()) << status.message;
    call.args.q = nullptr;
    const Status refused = call.make(&problem);
    EXPECT_FALSE(refused.ok());
    EXPECT_GT(allocations, before);  // the counter works
  }
}

}  // namespace
}  // namespace tandem::test
