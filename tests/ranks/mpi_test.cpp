// Ranks as processes of MPI: mpirun -n 3 ranks_mpi_test. Every process has the whole problem and computes its shard.
// With chunks the shard must have the bits of one rank.
#include <cstdio>
#include <cstring>
#include <string>

#include "ranks/shards.h"
#include "tandem/context_parallel_mpi.h"

namespace tandem::test {
namespace {

const char* const kCases[] = {
    "--packed 1 --lengths-q 41,0,1,26 --lengths-k 41,0,1,26 --heads-q 4 --heads-k 2 --causal 1 --sink f32 --dtype f32",
    "--packed 1 --lengths-q 41,7 --lengths-k 30,9 --heads-q 4 --heads-k 2 --left 9 --right 5 --dtype bf16",
};

// Returns the number of elements that a rank has written, or -1 if one differs from the expected bits.
int64_t count_equal(Outputs& own, Outputs& expected, Outputs& before) {
  int64_t written = 0;
  for (size_t n = 0; n < own.all().size(); ++n) {
    const Tensor &x = *own.all()[n], &y = *expected.all()[n], &z = *before.all()[n];
    if (!x) continue;
    const auto bytes = static_cast<size_t>(size_of(x.dtype()));
    for (int64_t i = 0; i < x.size(); ++i) {
      if (std::memcmp(x.element(i), z.element(i), bytes) == 0) continue;
      if (std::memcmp(x.element(i), y.element(i), bytes) != 0) return -1;
      ++written;
    }
  }
  return written;
}

// Returns an error message; empty: success.
std::string run_shard(const std::string& flags, int32_t execution, const tandem_cp_transport& transport) {
  Instance in(from_flags("--gradients qkv " + flags));
  for (const tandem_pass pass : {TANDEM_FORWARD, TANDEM_BACKWARD}) {
    Outputs expected = in.outputs(pass), own = in.outputs(pass), before = in.outputs(pass);
    run_on_ranks(in.problem(pass, &expected), {1, TANDEM_CP_BALANCED, TANDEM_CP_GATHER, 8});
    const Problem problem = in.problem(pass, &own);
    const CpPlan plan = plan_of(problem, {transport.ranks, TANDEM_CP_ZIGZAG, execution, 8});
    const std::string error = run_rank(problem, {plan.get(), &transport, execution});
    if (!error.empty()) return error;
    int64_t written = count_equal(own, expected, before), all = 0, elements = 0;
    if (written < 0) return "the bits must be the bits of one rank, in pass " + std::to_string(pass);
    MPI_Allreduce(&written, &all, 1, MPI_INT64_T, MPI_SUM, MPI_COMM_WORLD);
    for (const Tensor* x : own.all()) elements += *x ? x->size() : 0;
    if (all != elements) return "the ranks must write every element once: " + std::to_string(all);
    if (pass == TANDEM_FORWARD) in.give_results(&expected);
  }
  return "";
}

}  // namespace
}  // namespace tandem::test

int main(int argc, char** argv) {
  MPI_Init(&argc, &argv);
  tandem_cp_mpi mpi;
  tandem_cp_transport transport{};
  int failures = tandem_cp_mpi_open(MPI_COMM_WORLD, &mpi, &transport) != 0;
  for (const char* flags : tandem::test::kCases) {
    for (const int32_t execution : {TANDEM_CP_GATHER, TANDEM_CP_RING, TANDEM_CP_HEADS}) {
      const std::string error = tandem::test::run_shard(flags, execution, transport);
      if (!error.empty())
        std::printf("rank %d, execution %d: %s: %s\n", transport.rank, execution, flags, error.c_str());
      failures += !error.empty();
    }
  }
  failures += tandem_cp_mpi_close(&mpi) != 0;
  MPI_Finalize();
  return failures != 0;
}
