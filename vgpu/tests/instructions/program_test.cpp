// Random programs of instructions whose results are exact: nested branches and loops that lanes leave one by one,
// exchanges between lanes and warps. All devices must compute the bits of a plain interpreter, which executes the same
// statements for the active threads.
#include <algorithm>
#include <bit>
#include <cmath>
#include <functional>

#include "base/text.h"
#include "support/random.h"
#include "vgpu/tests/instructions/bench.h"

namespace tandem::test {
namespace {

using u32 = uint32_t;
using s32 = int32_t;
using u64 = uint64_t;

constexpr u32 kRegisters = 8, kThreads = 96, kTable = 64;

struct Thread {
  u32 r[kRegisters];
};
using Threads = std::vector<Thread>;  // threads of a block
using Active = std::vector<u32>;      // numbers of the active threads
using Effect = std::function<void(Threads&, const Active&)>;

u32 of_float(float x) { return std::isnan(x) ? 0x7fffffffu : std::bit_cast<u32>(x); }
float to_float(u32 x) { return std::bit_cast<float>(x); }

// An instruction of three sources; its text names them a, b, c and the destination d.
struct Operation {
  const char* text;
  u32 (*f)(u32 a, u32 b, u32 c);
};
const Operation kOperations[] = {
    {"add.u32 d, a, b;", [](u32 a, u32 b, u32) { return a + b; }},
    {"sub.s32 d, a, b;", [](u32 a, u32 b, u32) { return a - b; }},
    {"mul.lo.u32 d, a, b;", [](u32 a, u32 b, u32) { return a * b; }},
    {"mul.hi.u32 d, a, b;", [](u32 a, u32 b, u32) { return static_cast<u32>(u64{a} * b >> 32); }},
    {"mul.hi.s32 d, a, b;",
     [](u32 a, u32 b, u32) {
       return static_cast<u32>(static_cast<u64>(int64_t{static_cast<s32>(a)} * static_cast<s32>(b)) >> 32);
     }},
    {"mad.lo.s32 d, a, b, c;", [](u32 a, u32 b, u32 c) { return a * b + c; }},
    {"and.b32 d, a, b;", [](u32 a, u32 b, u32) { return a & b; }},
    {"or.b32 d, a, b;", [](u32 a, u32 b, u32) { return a | b; }},
    {"xor.b32 d, a, b;", [](u32 a, u32 b, u32) { return a ^ b; }},
    {"not.b32 d, a;", [](u32 a, u32, u32) { return ~a; }},
    {"lop3.b32 d, a, b, c, 0xE8;", [](u32 a, u32 b, u32 c) { return (a & b) | (a & c) | (b & c); }},
    {"shf.l.wrap.b32 d, a, b, c;",
     [](u32 a, u32 b, u32 c) { return static_cast<u32>((u64{b} << 32 | a) << (c & 31) >> 32); }},
    {"{ .reg .b32 n; and.b32 n, b, 31; shr.s32 d, a, n; }",
     [](u32 a, u32 b, u32) { return static_cast<u32>(static_cast<s32>(a) >> (b & 31)); }},
    {"shl.b32 d, a, 5;", [](u32 a, u32, u32) { return a << 5; }},
    {"min.s32 d, a, b;",
     [](u32 a, u32 b, u32) { return static_cast<u32>(std::min(static_cast<s32>(a), static_cast<s32>(b))); }},
    {"max.u32 d, a, b;", [](u32 a, u32 b, u32) { return std::max(a, b); }},
    {"popc.b32 d, a;", [](u32 a, u32, u32) { return static_cast<u32>(std::popcount(a)); }},
    {"clz.b32 d, a;", [](u32 a, u32, u32) { return static_cast<u32>(std::countl_zero(a)); }},
    {"{ .reg .b32 n; or.b32 n, b, 1; div.u32 d, a, n; }", [](u32 a, u32 b, u32) { return a / (b | 1); }},
    {"{ .reg .b32 n; or.b32 n, b, 1; rem.u32 d, a, n; }", [](u32 a, u32 b, u32) { return a % (b | 1); }},
    {"add.rn.f32 d, a, b;", [](u32 a, u32 b, u32) { return of_float(to_float(a) + to_float(b)); }},
    {"mul.rn.f32 d, a, b;", [](u32 a, u32 b, u32) { return of_float(to_float(a) * to_float(b)); }},
    {"fma.rn.f32 d, a, b, c;",
     [](u32 a, u32 b, u32 c) { return of_float(std::fma(to_float(a), to_float(b), to_float(c))); }},
    {"div.rn.f32 d, a, b;", [](u32 a, u32 b, u32) { return of_float(to_float(a) / to_float(b)); }},
    {"cvt.rn.f32.s32 d, a;", [](u32 a, u32, u32) { return of_float(static_cast<float>(static_cast<s32>(a))); }},
};

class Writer {
 public:
  Writer(uint64_t seed, std::vector<u32> table) : random_(seed), table_(std::move(table)) {}

  // Generates statements. depth 0: all threads execute them.
  Effect block(int depth, int statements) {
    std::vector<Effect> list;
    for (int n = 0; n < statements; ++n) list.push_back(statement(depth));
    return [list](Threads& threads, const Active& active) {
      for (const Effect& effect : list) effect(threads, active);
    };
  }
  const std::string& text() const { return text_; }

 private:
  Effect statement(int depth) {
    const double x = random_.uniform();
    if (depth == 0 && x < 0.1) return shuffle();
    if (depth == 0 && x < 0.2) return exchange();
    if (depth < 3 && x < 0.3) return branch(depth);
    if (depth < 3 && x < 0.4) return loop(depth);
    return x < 0.5 ? gather() : operation();
  }

  u32 any() { return static_cast<u32>(random_.next() % kRegisters); }

  Effect operation() {
    const Operation& o = kOperations[random_.next() % std::size(kOperations)];
    const u32 d = any(), a = any(), b = any(), c = any();
    const bool guarded = o.text[0] != '{' && random_.chance(0.3);
    if (guarded) text_ += str_cat("setp.lt.s32 p, r", a, ", r", c, ";\n@p ");
    for (const char* at = o.text; *at != 0; ++at) {
      // An operand stands alone between separators.
      const bool alone = at != o.text && (at[-1] == ' ') && (at[1] == ',' || at[1] == ';');
      const u32 which = *at == 'd' ? d : *at == 'a' ? a : *at == 'b' ? b : c;
      text_ += alone && *at >= 'a' && *at <= 'd' ? str_cat("r", which) : std::string(1, *at);
    }
    text_ += "\n";
    return [=, f = o.f](Threads& threads, const Active& active) {
      for (const u32 t : active) {
        u32* r = threads[t].r;
        if (!guarded || static_cast<s32>(r[a]) < static_cast<s32>(r[c])) r[d] = f(r[a], r[b], r[c]);
      }
    };
  }

  Effect gather() {
    const u32 d = any(), a = any();
    text_ +=
        str_cat("and.b32 x, r", a, ", ", kTable - 1, ";\nmad.wide.u32 at, x, 4, in;\nld.global.b32 r", d, ", [at];\n");
    return [=, this](Threads& threads, const Active& active) {
      for (const u32 t : active) threads[t].r[d] = table_[threads[t].r[a] % kTable];
    };
  }

  Effect branch(int depth) {
    const u32 a = any(), b = any();
    const int label = labels_++;
    text_ += str_cat("setp.gt.u32 p, r", a, ", r", b, ";\n@p bra then", label, ";\n");
    const Effect otherwise = block(depth + 1, static_cast<int>(random_.between(0, 4)));
    text_ += str_cat("bra join", label, ";\nthen", label, ":\n");
    const Effect then = block(depth + 1, static_cast<int>(random_.between(1, 5)));
    text_ += str_cat("join", label, ":\n");
    return [=](Threads& threads, const Active& active) {
      Active taken, left;
      for (const u32 t : active) (threads[t].r[a] > threads[t].r[b] ? taken : left).push_back(t);
      otherwise(threads, left);
      then(threads, taken);
    };
  }

  // Repeats as often as the low bits of a register specify, at least once.
  Effect loop(int depth) {
    const u32 a = any();
    const int label = labels_++;
    text_ += str_cat("and.b32 n", depth, ", r", a, ", 3;\nloop", label, ":\n");
    const Effect body = block(depth + 1, static_cast<int>(random_.between(1, 4)));
    text_ +=
        str_cat("sub.s32 n", depth, ", n", depth, ", 1;\nsetp.ge.s32 p, n", depth, ", 0;\n@p bra loop", label, ";\n");
    return [=](Threads& threads, const Active& active) {
      std::vector<u32> left(threads.size());
      for (const u32 t : active) left[t] = threads[t].r[a] % 4;
      for (Active still = active; !still.empty();) {
        body(threads, still);
        std::erase_if(still, [&](u32 t) { return left[t]-- == 0; });
      }
    };
  }

  Effect shuffle() {
    const u32 d = any(), a = any(), distance = static_cast<u32>(random_.between(0, 31));
    text_ += str_cat("shfl.sync.bfly.b32 r", d, ", r", a, ", ", distance, ", 31, -1;\n");
    return [=](Threads& threads, const Active& active) {
      const Threads before = threads;
      for (const u32 t : active) threads[t].r[d] = before[t ^ distance].r[a];
    };
  }

  // Exchanges values with another warp, through shared memory.
  Effect exchange() {
    const u32 d = any(), a = any(), distance = static_cast<u32>(random_.between(1, kThreads - 1));
    text_ += str_cat("bar.sync 0;\nst.shared.b32 [own], r", a, ";\nbar.sync 0;\nadd.u32 x, tid, ", distance,
                     ";\nrem.u32 x, x, ", kThreads, ";\nmad.lo.u32 x, x, 4, words;\nld.shared.b32 r", d, ", [x];\n");
    return [=](Threads& threads, const Active& active) {
      const Threads before = threads;
      for (const u32 t : active) threads[t].r[d] = before[(t + distance) % kThreads].r[a];
    };
  }

  Random random_;
  const std::vector<u32> table_;
  std::string text_;
  int labels_ = 0;
};

constexpr const char* kProlog = R"(
  .reg .b32 r<8>, n<3>, x, tid, block, own, words;
  .reg .b64 in, out, at;
  .reg .pred p;
  .shared .align 4 .b32 memory[96];
  ld.param.u64 in, [p0];
  ld.param.u64 out, [p1];
  mov.u32 tid, %tid.x;
  mov.u32 block, %ctaid.x;
  mov.u32 words, memory;
  mad.lo.u32 own, tid, 4, words;
  mad.lo.u32 x, block, 96, tid;
  mad.wide.u32 out, x, 32, out;
)";

std::vector<u32> random_table(uint64_t seed) {
  Random random(seed);
  std::vector<u32> table(kTable);
  for (u32& x : table) {
    x = static_cast<u32>(random.next());
    if (random.chance(0.5)) x = std::bit_cast<u32>(static_cast<float>(random.normal()));
    if (random.chance(0.2)) x >>= 24;
  }
  return table;
}

TEST(Program, LeavesTheBitsOfAPlainInterpreter) {
  for (uint64_t seed = 1; seed <= 25; ++seed) {
    SCOPED_TRACE(seed);
    const std::vector<u32> table = random_table(seed);
    Writer writer(seed, table);
    const Effect effect = writer.block(0, 40);

    BenchKernel kernel;
    kernel.grid = {2, 1, 1}, kernel.block = {kThreads, 1, 1};
    kernel.body = kProlog;
    for (u32 i = 0; i < kRegisters; ++i)
      kernel.body += str_cat("mad.lo.u32 r", i, ", x, ", 2 * i + 1, ", ", table[i], ";\n");
    kernel.body += writer.text();
    for (u32 i = 0; i < kRegisters; ++i) kernel.body += str_cat("st.global.b32 [out+", 4 * i, "], r", i, ";\n");
    kernel.memory = {Memory::in(table), Memory::out(2 * kThreads * sizeof(Thread))};

    std::vector<Threads> want(2, Threads(kThreads));
    for (u32 block = 0; block < 2; ++block) {
      Active all;
      for (u32 t = 0; t < kThreads; ++t) {
        for (u32 i = 0; i < kRegisters; ++i) want[block][t].r[i] = (96 * block + t) * (2 * i + 1) + table[i];
        all.push_back(t);
      }
      effect(want[block], all);
    }
    on_each(kernel, [&](const Bench&, const BenchKernel& done) {
      for (u32 i = 0; i < 2 * kThreads * kRegisters; ++i)
        ASSERT_EQ(done.memory[1].at<u32>(i),
                  want[i / kRegisters / kThreads][i / kRegisters % kThreads].r[i % kRegisters])
            << "register " << i % kRegisters << " of thread " << i / kRegisters << "\n"
            << kernel.body;
    });
  }
}

}  // namespace
}  // namespace tandem::test
