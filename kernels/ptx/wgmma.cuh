// Matrix products of a warpgroup: 64 x N += 64 x 16 * 16 x N with bf16 or f16 elements and float32 sums (PTX ISA
// "wgmma.mma_async"). All 128 threads execute each function.
//
// Register r of thread t holds one sum. The sum's row is 16 (t / 32) + t % 32 / 4 + 8 (r / 2 % 2). The sum's column is
// 8 (r / 4) + 2 (t % 4) + r % 2.
//
// A product is asynchronous: its registers may not be touched between its issue and the wait that covers it.
#pragma once
#include "ptx/base.cuh"

// Required before the first product, and after ordinary instructions have written a product's registers.
TANDEM_DEVICE void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
TANDEM_DEVICE void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// Waits until at most the last `pending` committed groups are outstanding.
template <int pending>
TANDEM_DEVICE void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(pending) : "memory");
}
// Matrix descriptor of 16-bit elements in rows of 64 with TMA's 128-byte swizzle (PTX ISA "Matrix Descriptor Format").
// stride_bytes: from 8 rows to the next 8. leading_bytes: from 64 columns to the next 64 of a transposed operand; else
// unused.
TANDEM_DEVICE u64 wgmma_smem_desc(u32 address, u32 leading_bytes, u32 stride_bytes) {
  return static_cast<u64>((address & 0x3ffff) >> 4) | static_cast<u64>(leading_bytes >> 4) << 16 |
         static_cast<u64>(stride_bytes >> 4) << 32 | u64{1} << 62;
}

#define TANDEM_O8(d, i)                                                                                       \
  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), \
      "+f"(d[i + 7])
// The first n registers of d, as operands and as the instruction lists them.
#define TANDEM_OUT8 TANDEM_O8(d, 0)
#define TANDEM_OUT16 TANDEM_OUT8, TANDEM_O8(d, 8)
#define TANDEM_OUT24 TANDEM_OUT16, TANDEM_O8(d, 16)
#define TANDEM_OUT32 TANDEM_OUT24, TANDEM_O8(d, 24)
#define TANDEM_OUT40 TANDEM_OUT32, TANDEM_O8(d, 32)
#define TANDEM_OUT48 TANDEM_OUT40, TANDEM_O8(d, 40)
#define TANDEM_OUT56 TANDEM_OUT48, TANDEM_O8(d, 48)
#define TANDEM_OUT64 TANDEM_OUT56, TANDEM_O8(d, 56)
#define TANDEM_OUT72 TANDEM_OUT64, TANDEM_O8(d, 64)
#define TANDEM_OUT80 TANDEM_OUT72, TANDEM_O8(d, 72)
#define TANDEM_OUT88 TANDEM_OUT80, TANDEM_O8(d, 80)
#define TANDEM_OUT96 TANDEM_OUT88, TANDEM_O8(d, 88)
#define TANDEM_OUT104 TANDEM_OUT96, TANDEM_O8(d, 96)
#define TANDEM_OUT112 TANDEM_OUT104, TANDEM_O8(d, 104)
#define TANDEM_OUT120 TANDEM_OUT112, TANDEM_O8(d, 112)
#define TANDEM_OUT128 TANDEM_OUT120, TANDEM_O8(d, 120)
#define TANDEM_R8 "%0,%1,%2,%3,%4,%5,%6,%7"
#define TANDEM_R16 TANDEM_R8 ",%8,%9,%10,%11,%12,%13,%14,%15"
#define TANDEM_R24 TANDEM_R16 ",%16,%17,%18,%19,%20,%21,%22,%23"
#define TANDEM_R32 TANDEM_R24 ",%24,%25,%26,%27,%28,%29,%30,%31"
#define TANDEM_R40 TANDEM_R32 ",%32,%33,%34,%35,%36,%37,%38,%39"
#define TANDEM_R48 TANDEM_R40 ",%40,%41,%42,%43,%44,%45,%46,%47"
#define TANDEM_R56 TANDEM_R48 ",%48,%49,%50,%51,%52,%53,%54,%55"
#define TANDEM_R64 TANDEM_R56 ",%56,%57,%58,%59,%60,%61,%62,%63"
#define TANDEM_R72 TANDEM_R64 ",%64,%65,%66,%67,%68,%69,%70,%71"
#define TANDEM_R80 TANDEM_R72 ",%72,%73,%74,%75,%76,%77,%78,%79"
#define TANDEM_R88 TANDEM_R80 ",%80,%81,%82,%83,%84,%85,%86,%87"
#define TANDEM_R96 TANDEM_R88 ",%88,%89,%90,%91,%92,%93,%94,%95"
#define TANDEM_R104 TANDEM_R96 ",%96,%97,%98,%99,%100,%101,%102,%103"
#define TANDEM_R112 TANDEM_R104 ",%104,%105,%106,%107,%108,%109,%110,%111"
#define TANDEM_R120 TANDEM_R112 ",%112,%113,%114,%115,%116,%117,%118,%119"
#define TANDEM_R128 TANDEM_R120 ",%120,%121,%122,%123,%124,%125,%126,%127"

// d += a b, or d = a b if not add. The name has the sources of a and b (s: shared memory, r: registers) and their
// layouts: n is rows x columns, t is transposed. q k^T is ss_nt, p v is rs_nn. ..._of_4: four products along the inner
// dimension in one statement, which compiles faster. Operands are contiguous.
template <bool f16, int N>
struct Wgmma;

// clang-format off
// Operand numbers of the statement: A, B, C, ... follow the R registers of d. Transposition is an immediate.
#define TANDEM_MMA(TYPE, N, R, LEFT, RIGHT, ADD, ORDER)                                                                \
  "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPE "." TYPE " {" TANDEM_R##R "}, " LEFT ", " RIGHT ", " ADD ", 1, 1, "\
  ORDER ";"
#define TANDEM_4(A, B, C, D) "{%" #A ", %" #B ", %" #C ", %" #D "}"
// The distance between operands along the inner dimension, in units of 16 bytes: 16 elements of a row, or 16 rows.
constexpr int wgmma_next(bool along_rows) { return along_rows ? 2 : 128; }
#define TANDEM_WGMMA_SS(TYPE, N, R, A, B, C, D, E, F, G, H, I, J, K)                                                   \
    template <bool trans_a, bool trans_b>                                                                              \
    static TANDEM_DEVICE void ss(float (&d)[N / 2], u64 a, u64 b, bool add) {                                          \
      asm volatile("{.reg .pred p; setp.ne.b32 p, %" #C ", 0;"                                                         \
                   TANDEM_MMA(TYPE, N, R, "%" #A, "%" #B, "p", "%" #D ", %" #E) "}"                                    \
                   : TANDEM_OUT##R                                                                                     \
                   : "l"(a), "l"(b), "r"(static_cast<u32>(add)), "n"(trans_a ? 1 : 0), "n"(trans_b ? 0 : 1));          \
    }                                                                                                                  \
    template <bool trans_a, bool trans_b>                                                                              \
    static TANDEM_DEVICE void ss_of_4(float (&d)[N / 2], u64 a, u64 b, bool add) {                                     \
      constexpr int kA = wgmma_next(!trans_a), kB = wgmma_next(trans_b);                                               \
      asm volatile("{.reg .pred p, q; .reg .b64 a1, a2, a3, b1, b2, b3; setp.ne.b32 p, %" #C ", 0; setp.ne.b32 q, 1, 0;"\
                   "add.s64 a1, %" #A ", %" #F "; add.s64 a2, %" #A ", %" #G "; add.s64 a3, %" #A ", %" #H ";"         \
                   "add.s64 b1, %" #B ", %" #I "; add.s64 b2, %" #B ", %" #J "; add.s64 b3, %" #B ", %" #K ";"         \
                   TANDEM_MMA(TYPE, N, R, "%" #A, "%" #B, "p", "%" #D ", %" #E)                                        \
                   TANDEM_MMA(TYPE, N, R, "a1", "b1", "q", "%" #D ", %" #E)                                            \
                   TANDEM_MMA(TYPE, N, R, "a2", "b2", "q", "%" #D ", %" #E)                                            \
                   TANDEM_MMA(TYPE, N, R, "a3", "b3", "q", "%" #D ", %" #E) "}"                                        \
                   : TANDEM_OUT##R                                                                                     \
                   : "l"(a), "l"(b), "r"(static_cast<u32>(add)), "n"(trans_a ? 1 : 0), "n"(trans_b ? 0 : 1),           \
                     "n"(kA), "n"(2 * kA), "n"(3 * kA), "n"(kB), "n"(2 * kB), "n"(3 * kB));                            \
    }
#define TANDEM_WGMMA_RS(TYPE, N, R, A, B, C, D, E, F, G, H, I, J, K, L, M, O, P, Q, S, T, U, V)                        \
    template <bool trans_b>                                                                                            \
    static TANDEM_DEVICE void rs(float (&d)[N / 2], const u32* a, u64 b, bool add) {                                   \
      asm volatile("{.reg .pred p; setp.ne.b32 p, %" #B ", 0;"                                                         \
                   TANDEM_MMA(TYPE, N, R, TANDEM_4(C, D, E, F), "%" #A, "p", "%" #G) "}"                               \
                   : TANDEM_OUT##R                                                                                     \
                   : "l"(b), "r"(static_cast<u32>(add)), "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]),                   \
                     "n"(trans_b ? 0 : 1));                                                                            \
    }                                                                                                                  \
    template <bool trans_b>                                                                                            \
    static TANDEM_DEVICE void rs_of_4(float (&d)[N / 2], const u32* a, u64 b, bool add) {                              \
      asm volatile("{.reg .pred p, q; .reg .b64 b1, b2, b3; setp.ne.b32 p, %" #B ", 0; setp.ne.b32 q, 1, 0;"           \
                   "add.s64 b1, %" #A ", %" #V "; add.s64 b2, b1, %" #V "; add.s64 b3, b2, %" #V ";"                   \
                   TANDEM_MMA(TYPE, N, R, TANDEM_4(C, D, E, F), "%" #A, "p", "%" #U)                                   \
                   TANDEM_MMA(TYPE, N, R, TANDEM_4(G, H, I, J), "b1", "q", "%" #U)                                     \
                   TANDEM_MMA(TYPE, N, R, TANDEM_4(K, L, M, O), "b2", "q", "%" #U)                                     \
                   TANDEM_MMA(TYPE, N, R, TANDEM_4(P, Q, S, T), "b3", "q", "%" #U) "}"                                 \
                   : TANDEM_OUT##R                                                                                     \
                   : "l"(b), "r"(static_cast<u32>(add)), "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(a[4]),        \
                     "r"(a[5]), "r"(a[6]), "r"(a[7]), "r"(a[8]), "r"(a[9]), "r"(a[10]), "r"(a[11]), "r"(a[12]),        \
                     "r"(a[13]), "r"(a[14]), "r"(a[15]), "n"(trans_b ? 0 : 1), "n"(wgmma_next(trans_b)));              \
    }
// Defines one function for each source and layout.
#define TANDEM_WGMMA_NAMED(N, NAME, A, FORM)                                                                           \
    static TANDEM_DEVICE void NAME(float (&d)[N / 2], A a, u64 b, bool add) { FORM(d, a, b, add); }
#define TANDEM_WGMMA(F16, TYPE, N, R, A, B, C, D, E, F, G, H, I, J, K, L, M, O, P, Q, S, T, U, V)                      \
  template <>                                                                                                          \
  struct Wgmma<F16, N> {                                                                                               \
    TANDEM_WGMMA_SS(TYPE, N, R, A, B, C, D, E, F, G, H, I, J, K)                                                       \
    TANDEM_WGMMA_RS(TYPE, N, R, A, B, C, D, E, F, G, H, I, J, K, L, M, O, P, Q, S, T, U, V)                            \
    TANDEM_WGMMA_NAMED(N, ss_nn, u64, (ss<false, false>)) TANDEM_WGMMA_NAMED(N, ss_nn_of_4, u64, (ss_of_4<false, false>))\
    TANDEM_WGMMA_NAMED(N, ss_nt, u64, (ss<false, true>)) TANDEM_WGMMA_NAMED(N, ss_nt_of_4, u64, (ss_of_4<false, true>))\
    TANDEM_WGMMA_NAMED(N, ss_tn, u64, (ss<true, false>)) TANDEM_WGMMA_NAMED(N, ss_tn_of_4, u64, (ss_of_4<true, false>))\
    TANDEM_WGMMA_NAMED(N, ss_tt, u64, (ss<true, true>)) TANDEM_WGMMA_NAMED(N, ss_tt_of_4, u64, (ss_of_4<true, true>))  \
    TANDEM_WGMMA_NAMED(N, rs_nn, const u32*, rs<false>) TANDEM_WGMMA_NAMED(N, rs_nn_of_4, const u32*, rs_of_4<false>)  \
    TANDEM_WGMMA_NAMED(N, rs_nt, const u32*, rs<true>) TANDEM_WGMMA_NAMED(N, rs_nt_of_4, const u32*, rs_of_4<true>)    \
  };
#define TANDEM_WGMMAS(...) TANDEM_WGMMA(false, "bf16", __VA_ARGS__) TANDEM_WGMMA(true, "f16", __VA_ARGS__)
// clang-format on

// A translation unit may select two or four widths, because parsing all of them takes a tenth of a kernel's compile
// time.
#ifdef TANDEM_WGMMA_N2
#define TANDEM_IS_NEEDED(N) \
  (N == TANDEM_WGMMA_N0 || N == TANDEM_WGMMA_N1 || N == TANDEM_WGMMA_N2 || N == TANDEM_WGMMA_N3)
#elif defined TANDEM_WGMMA_N0
#define TANDEM_IS_NEEDED(N) (N == TANDEM_WGMMA_N0 || N == TANDEM_WGMMA_N1)
#else
#define TANDEM_IS_NEEDED(N) 1
#endif
#if TANDEM_IS_NEEDED(16)
TANDEM_WGMMAS(16, 8, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21, 22, 23, 24, 25, 26, 27)
#endif
#if TANDEM_IS_NEEDED(32)
TANDEM_WGMMAS(32, 16, 16, 17, 18, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28, 29, 30, 31, 32, 33, 34, 35)
#endif
#if TANDEM_IS_NEEDED(48)
TANDEM_WGMMAS(48, 24, 24, 25, 26, 27, 28, 29, 30, 31, 32, 33, 34, 35, 36, 37, 38, 39, 40, 41, 42, 43)
#endif
#if TANDEM_IS_NEEDED(64)
TANDEM_WGMMAS(64, 32, 32, 33, 34, 35, 36, 37, 38, 39, 40, 41, 42, 43, 44, 45, 46, 47, 48, 49, 50, 51)
#endif
#if TANDEM_IS_NEEDED(80)
TANDEM_WGMMAS(80, 40, 40, 41, 42, 43, 44, 45, 46, 47, 48, 49, 50, 51, 52, 53, 54, 55, 56, 57, 58, 59)
#endif
#if TANDEM_IS_NEEDED(96)
TANDEM_WGMMAS(96, 48, 48, 49, 50, 51, 52, 53, 54, 55, 56, 57, 58, 59, 60, 61, 62, 63, 64, 65, 66, 67)
#endif
#if TANDEM_IS_NEEDED(112)
TANDEM_WGMMAS(112, 56, 56, 57, 58, 59, 60, 61, 62, 63, 64, 65, 66, 67, 68, 69, 70, 71, 72, 73, 74, 75)
#endif
#if TANDEM_IS_NEEDED(128)
TANDEM_WGMMAS(128, 64, 64, 65, 66, 67, 68, 69, 70, 71, 72, 73, 74, 75, 76, 77, 78, 79, 80, 81, 82, 83)
#endif
#if TANDEM_IS_NEEDED(144)
TANDEM_WGMMAS(144, 72, 72, 73, 74, 75, 76, 77, 78, 79, 80, 81, 82, 83, 84, 85, 86, 87, 88, 89, 90, 91)
#endif
#if TANDEM_IS_NEEDED(160)
TANDEM_WGMMAS(160, 80, 80, 81, 82, 83, 84, 85, 86, 87, 88, 89, 90, 91, 92, 93, 94, 95, 96, 97, 98, 99)
#endif
#if TANDEM_IS_NEEDED(176)
TANDEM_WGMMAS(176, 88, 88, 89, 90, 91, 92, 93, 94, 95, 96, 97, 98, 99, 100, 101, 102, 103, 104, 105, 106, 107)
#endif
#if TANDEM_IS_NEEDED(192)
TANDEM_WGMMAS(192, 96, 96, 97, 98, 99, 100, 101, 102, 103, 104, 105, 106, 107, 108, 109, 110, 111, 112, 113, 114, 115)
#endif
#if TANDEM_IS_NEEDED(208)
TANDEM_WGMMAS(208, 104, 104, 105, 106, 107, 108, 109, 110, 111, 112, 113, 114, 115, 116, 117, 118, 119, 120, 121, 122,
              123)
#endif
#if TANDEM_IS_NEEDED(224)
TANDEM_WGMMAS(224, 112, 112, 113, 114, 115, 116, 117, 118, 119, 120, 121, 122, 123, 124, 125, 126, 127, 128, 129, 130,
              131)
#endif
#if TANDEM_IS_NEEDED(240)
TANDEM_WGMMAS(240, 120, 120, 121, 122, 123, 124, 125, 126, 127, 128, 129, 130, 131, 132, 133, 134, 135, 136, 137, 138,
              139)
#endif
#if TANDEM_IS_NEEDED(256)
TANDEM_WGMMAS(256, 128, 128, 129, 130, 131, 132, 133, 134, 135, 136, 137, 138, 139, 140, 141, 142, 143, 144, 145, 146,
              147)
#endif
