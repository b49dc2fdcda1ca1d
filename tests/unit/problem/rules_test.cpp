// Every rule of a call is broken once: a row breaks one rule and lists the names that the message must have.
#include <gtest/gtest.h>

#include <cstddef>
#include <cstring>
#include <limits>
#include <ostream>

#include "unit/problem/call.h"

namespace tandem::test {
namespace {

constexpr int64_t kHuge = int64_t{1} << 62;
constexpr double kNan = std::numeric_limits<double>::quiet_NaN(), kInf = std::numeric_limits<double>::infinity();

using Base = void (Call::*)();

struct Rule {
  const char* name;
  Base base;
  tandem_pass pass;
  void (*spoil)(Call&);
  std::vector<const char*> says;
  tandem_status code = TANDEM_INVALID_ARGUMENT;
};

constexpr Base dense = &Call::dense, packed = &Call::packed, paged = &Call::paged;
constexpr tandem_pass forward = TANDEM_FORWARD, backward = TANDEM_BACKWARD;

const Rule rules[] = {
    // Rules of the struct.
    {"SizeZero", dense, forward, [](Call& c) { c.args.size = 0; }, {"args.size (0) must be"}},
    {"SizeSmall", dense, forward, [](Call& c) { c.args.size -= 1; }, {"args.size (", "must be sizeof"}},
    {"SizeNegative", dense, forward, [](Call& c) { c.args.size = -8; }, {"args.size (-8) must be"}},
    {"SizeWild", dense, forward, [](Call& c) { c.args.size = kHuge; }, {"args.size (4611686018427387904)"}},
    {"SizeOlderThanTheFirst", dense, forward, [](Call& c) { c.args.size = 280; }, {"args.size (280) must be sizeof"}},
    {"Reserved", dense, forward, [](Call& c) { c.args.reserved = 3; }, {"reserved (3) must be 0"}},
    {"Reserved2", dense, forward, [](Call& c) { c.args.reserved_2 = 3; }, {"reserved_2 (3) must be 0"}},
    {"Alignment", dense, forward, [](Call& c) { c.args.alignment = 3; }, {"alignment (3)", "TANDEM_EXPLICIT"}},
    {"AlignmentNegative", dense, forward, [](Call& c) { c.args.alignment = -1; }, {"alignment (-1)"}},
    {"DiagonalOffset", dense, forward, [](Call& c) { c.args.diagonal_offset = -4; },
     {"diagonal_offset (-4) must be 0 unless alignment (0) is TANDEM_EXPLICIT"}},
    {"DiagonalOffsets", dense, backward, [](Call& c) { c.args.alignment = 1, c.args.diagonal_offsets = &c.seqused_q.handle; },
     {"diagonal_offsets must be NULL unless alignment (1) is TANDEM_EXPLICIT"}},
    {"DiagonalOffsetsLength", packed, forward,
     [](Call& c) { c.args.alignment = 2, c.args.diagonal_offsets = &c.cu_seqlens_q.handle; },
     {"diagonal_offsets.length (3) must be 2: expand the tensor to one offset per sequence"}},
    {"DiagonalOffsetsType", dense, forward, [](Call& c) { c.args.alignment = 2, c.args.diagonal_offsets = &c.sink.handle; },
     {"diagonal_offsets.dtype (float32) must be int32"}},
    {"PlacesShape", dense, forward, [](Call& c) { c.args.places = &c.seqused_q.handle; },
     {"places.ndim (1) must be 2: pass places as (batch, members)"}},
    {"PlacesMembers", dense, forward,
     [](Call& c) { c.page_table.make({2, 3}, kI32), c.args.places = &c.page_table.handle; },
     {"places.members (3) must equal tandem_place.members (9)"}},
    {"PlacesStrides", dense, backward,
     [](Call& c) {
       c.page_table.make({2, 18}, kI32), c.args.places = &c.page_table.handle;
       c.page_table.shape[1] = 9, c.page_table.set_strides({18, 1});
     },
     {"places.strides (18, 1) must be 9 and 1: copy the places"}},
    {"BlocksAlone", dense, forward, [](Call& c) { c.args.kv_num_blocks = &c.seqused_q.handle; },
     {"kv_indices (NULL) must be given with kv_num_blocks"}},
    {"BlocksWithoutCounts", dense, backward, [](Call& c) { c.args.kv_indices = &c.seqused_q.handle; },
     {"kv_indices must be NULL without kv_num_blocks"}},
    {"BlocksFullAlone", dense, forward,
     [](Call& c) { c.args.full_kv_num_blocks = c.args.full_kv_indices = &c.seqused_q.handle; },
     {"kv_num_blocks (NULL) must be given with full_kv_num_blocks"}},
    {"BlocksWithoutSize", dense, forward,
     [](Call& c) { c.args.kv_num_blocks = c.args.kv_indices = &c.seqused_q.handle, c.args.mask_block_k = 1; },
     {"mask_block_q (0) must be at least 1"}},
    {"BlockSizeAlone", dense, forward, [](Call& c) { c.args.mask_block_k = -128; },
     {"mask_block_k (-128) must be 0 without kv_num_blocks"}},
    {"BlocksRank", dense, forward,
     [](Call& c) {
       c.args.kv_num_blocks = c.args.kv_indices = &c.seqused_q.handle;
       c.args.mask_block_q = c.args.mask_block_k = 128;
     },
     {"kv_num_blocks.ndim (1) must be 3: pass kv_num_blocks as (batch, heads, blocks)"}},
    {"BlocksPacked", packed, forward,
     [](Call& c) {
       c.args.kv_num_blocks = c.args.kv_indices = &c.cu_seqlens_q.handle;
       c.args.mask_block_q = c.args.mask_block_k = 128;
     },
     {"kv_num_blocks must be NULL with cu_seqlens_q"}},
    {"SmLimit", dense, forward, [](Call& c) { c.args.sm_limit = -1; }, {"sm_limit (-1) must be 0 (no limit)"}},
    {"Splits", dense, forward, [](Call& c) { c.args.num_splits = -1; }, {"num_splits (-1) must be 0 to 1024"}},
    {"SplitsMany", dense, forward, [](Call& c) { c.args.num_splits = 1025; }, {"num_splits (1025)"}},

    // Window.
    {"WindowBits", dense, forward, [](Call& c) { c.args.window = 4; }, {"window (4)", "TANDEM_WINDOW_LEFT"}},
    {"LeftNoBit", dense, forward, [](Call& c) { c.args.window_left = 7; }, {"window_left (7)", "set the bit"}},
    {"RightNoBit", dense, forward, [](Call& c) { c.args.window = 1, c.args.window_right = -2; },
     {"window_right (-2)", "TANDEM_WINDOW_RIGHT"}},
    {"WindowInverted", dense, forward,
     [](Call& c) { c.args.window = 3, c.args.window_left = -5, c.args.window_right = 4; },
     {"window_left (-5) + window_right (4)", "at least 0"}},
    {"WindowInvertedFar", dense, forward,
     [](Call& c) { c.args.window = 3, c.args.window_left = INT64_MIN, c.args.window_right = INT64_MIN; },
     {"window_left (", "at least 0"}},
    {"CausalInverted", dense, forward,
     [](Call& c) { c.args.causal = 1, c.args.window = 3, c.args.window_left = -5, c.args.window_right = 9; },
     {"window_left (-5) + window_right (0, as causal is set)"}},

    // Numbers.
    {"ScaleNan", dense, forward, [](Call& c) { c.args.softmax_scale = kNan; }, {"softmax_scale (nan)", "finite"}},
    {"ScaleInf", dense, forward, [](Call& c) { c.args.softmax_scale = -kInf; }, {"softmax_scale (-inf)"}},
    {"ScaleWide", dense, forward, [](Call& c) { c.args.softmax_scale = 1e39; }, {"softmax_scale (1e+39)", "float32"}},
    {"SoftcapNan", dense, forward, [](Call& c) { c.args.softcap = kNan; }, {"softcap (nan)"}},
    {"SoftcapInf", dense, forward, [](Call& c) { c.args.softcap = kInf; }, {"softcap (inf)"}},
    {"SoftcapNegative", dense, forward, [](Call& c) { c.args.softcap = -30; }, {"softcap (-30)", "positive"}},
    {"SoftcapTiny", dense, forward, [](Call& c) { c.args.softcap = 1e-40; }, {"softcap (1e-40)", "normal float32"}},
    {"DropoutNan", dense, forward, [](Call& c) { c.args.dropout_p = kNan; }, {"dropout_p (nan)"}},
    {"DropoutNegative", dense, forward, [](Call& c) { c.args.dropout_p = -0.1; }, {"dropout_p (-0.1)"}},
    {"DropoutOne", dense, forward, [](Call& c) { c.args.dropout_p = 1; }, {"dropout_p (1)", "below 1"}},
    {"DropoutSeedAlign", dense, forward,
     [](Call& c) {
       c.args.dropout_p = 0.5;
       c.args.dropout_seed_ptr = reinterpret_cast<const uint64_t*>(reinterpret_cast<char*>(c.q.memory.data()) + 4);
     },
     {"dropout_seed_ptr (address", "multiple of 8"}},
    {"DropoutOffsetAlign", dense, forward,
     [](Call& c) {
       c.args.dropout_p = 0.5;
       c.args.dropout_offset_ptr = reinterpret_cast<const uint64_t*>(reinterpret_cast<char*>(c.q.memory.data()) + 1);
     },
     {"dropout_offset_ptr (address", "multiple of 8"}},

    // Rules of every tensor.
    {"NoQ", dense, forward, [](Call& c) { c.args.q = nullptr; }, {"q (NULL)", "forward pass"}},
    {"NoK", dense, forward, [](Call& c) { c.args.k = nullptr; }, {"k (NULL)"}},
    {"NoV", dense, forward, [](Call& c) { c.args.v = nullptr; }, {"v (NULL)"}},
    {"NoOut", dense, forward, [](Call& c) { c.args.out = nullptr; }, {"out (NULL)"}},
    {"NoLse", dense, backward, [](Call& c) { c.args.lse = nullptr; }, {"lse (NULL)", "backward pass"}},
    {"NoDout", dense, backward, [](Call& c) { c.args.dout = nullptr; }, {"dout (NULL)", "backward pass"}},
    {"NoShape", dense, forward, [](Call& c) { c.q.handle.shape = nullptr; }, {"q.shape (NULL)"}},
    {"NoData", dense, forward, [](Call& c) { c.k.handle.data = nullptr; }, {"k.data (NULL)", "2, 5, 2, 8"}},
    {"NoDataOut", dense, forward, [](Call& c) { c.out.handle.data = nullptr; }, {"out.data (NULL)"}},
    {"NoDataIndex", packed, forward, [](Call& c) { c.cu_seqlens_k.handle.data = nullptr; }, {"cu_seqlens_k.data (NULL)"}},
    {"RankQ", dense, forward, [](Call& c) { c.q.handle.ndim = 3; }, {"q.ndim (3) must be 4", "unless cu_seqlens_q"}},
    {"RankNegative", dense, forward, [](Call& c) { c.v.handle.ndim = -1; }, {"v.ndim (-1) must be 4"}},
    {"RankWild", dense, forward, [](Call& c) { c.k.handle.ndim = INT32_MAX; }, {"k.ndim (2147483647) must be 4"}},
    {"RankPackedQ", packed, forward, [](Call& c) { c.q.make({1, 5, 4, 8}, kF32); },
     {"q.ndim (4) must be 3", "(total, heads, head_dim)", "where cu_seqlens_q is given"}},
    {"RankPackedK", packed, forward, [](Call& c) { c.k.make({1, 7, 2, 8}, kF32); },
     {"k.ndim (4) must be 3", "where cu_seqlens_k is given"}},
    {"RankPaged", paged, forward, [](Call& c) { c.k.make({6, 2, 8}, kF32); },
     {"k.ndim (3) must be 4", "pages, page_size", "page_table"}},
    {"RankOut", dense, forward, [](Call& c) { c.out.make({2, 3, 24}, kF32); }, {"out.ndim (3) must be 4"}},
    {"RankLse", dense, forward, [](Call& c) { c.lse.make({4, 3}, kF32); }, {"lse.ndim (2) must be 3"}},
    {"RankLsePacked", packed, forward, [](Call& c) { c.lse.make({2, 4, 3}, kF32); }, {"lse.ndim (3) must be 2"}},
    {"RankBias", dense, forward, [](Call& c) { c.bias.make({3, 5}, kF32); }, {"bias.ndim (2) must be 4"}},
    {"RankSink", dense, forward, [](Call& c) { c.sink.make({1, 4}, kF32); }, {"sink.ndim (2) must be 1"}},
    {"RankAlibi", dense, forward, [](Call& c) { c.alibi_slopes.make({1, 2, 4}, kF32); },
     {"alibi_slopes.ndim (3) must be 1", "or (batch, heads)"}},
    {"RankIndex", packed, forward, [](Call& c) { c.cu_seqlens_q.make({3, 1}, kI32); }, {"cu_seqlens_q.ndim (2) must be 1"}},
    {"RankPageTable", paged, forward, [](Call& c) { c.page_table.make({1, 2, 3}); }, {"page_table.ndim (1) must be 2"}},
    {"SizeBelowZero", dense, forward, [](Call& c) { c.q.shape[1] = -3; }, {"q.seqlen (-3) must be 0 to 2147483647"}},
    {"SizeAbove", dense, forward, [](Call& c) { c.k.shape[1] = int64_t{1} << 31; }, {"k.seqlen (2147483648) must be 0 to 2147483647"}},
    {"DtypeUnknown", dense, forward, [](Call& c) { c.q.handle.dtype = {9, 8, 1}; }, {"q.dtype (code 9, 8 bits)"}},
    {"DtypeInt", dense, forward, [](Call& c) { c.q.handle.dtype = {TANDEM_INT, 64, 1}; },
     {"q.dtype (int64) must be float32, bfloat16, float16 or float64"}},
    {"DtypeUint", dense, forward, [](Call& c) { c.q.handle.dtype = {TANDEM_UINT, 16, 1}; }, {"q.dtype (uint16)"}},
    {"DtypeWide", dense, forward, [](Call& c) { c.q.handle.dtype = {TANDEM_FLOAT, 128, 1}; }, {"q.dtype (float128)"}},
    {"DtypeK", dense, forward, [](Call& c) { c.k.handle.dtype = kBf16; }, {"k.dtype (bfloat16) must be float32"}},
    {"DtypeV", dense, forward, [](Call& c) { c.v.handle.dtype = kF16; }, {"v.dtype (float16) must be float32"}},
    {"DtypeOut", dense, forward, [](Call& c) { c.out.handle.dtype = kF16; }, {"out.dtype (float16) must be float32"}},
    {"DtypeLse", dense, forward, [](Call& c) { c.lse.handle.dtype = kF16; }, {"lse.dtype (float16) must be float32"}},
    {"DtypeLse64", dense, forward, [](Call& c) { c.lse.make({2, 4, 3}, kF64); }, {"lse.dtype (float64) must be float32"}},
    {"DtypeDout", dense, backward, [](Call& c) { c.dout.handle.dtype = kF16; }, {"dout.dtype (float16)"}},
    {"DtypeDlse", dense, backward, [](Call& c) { c.dlse.handle.dtype = kF16; }, {"dlse.dtype (float16)"}},
    {"DtypeDq", dense, backward, [](Call& c) { c.dq.handle.dtype = kF16; }, {"dq.dtype (float16)"}},
    {"DtypeDk", dense, backward, [](Call& c) { c.dk.handle.dtype = kBf16; }, {"dk.dtype (bfloat16)"}},
    {"DtypeDv", dense, backward, [](Call& c) { c.dv.handle.dtype = kBf16; }, {"dv.dtype (bfloat16)"}},
    {"DtypeBias", dense, forward, [](Call& c) { c.bias.handle.dtype = kF16; },
     {"bias.dtype (float16) must be float32 or bool"}},
    {"DtypeDbias", dense, backward, [](Call& c) { c.dbias.handle.dtype = kF16; }, {"dbias.dtype (float16)"}},
    {"DtypeSink", dense, forward, [](Call& c) { c.sink.handle.dtype = kI32; }, {"sink.dtype (int32) must be float32"}},
    {"DtypeDsink", dense, backward, [](Call& c) { c.dsink.handle.dtype = kBf16; }, {"dsink.dtype (bfloat16)"}},
    {"DtypeAlibi", dense, forward, [](Call& c) { c.alibi_slopes.handle.dtype = kF16; }, {"alibi_slopes.dtype (float16)"}},
    {"DtypeIndex", packed, forward, [](Call& c) { c.cu_seqlens_q.handle.dtype = {TANDEM_INT, 64, 1}; },
     {"cu_seqlens_q.dtype (int64) must be int32"}},
    {"DtypeUsed", dense, forward, [](Call& c) { c.seqused_k.handle.dtype = kF32; }, {"seqused_k.dtype (float32)"}},
    {"DtypePages", paged, forward, [](Call& c) { c.page_table.handle.dtype = kF32; }, {"page_table.dtype (float32)"}},
    {"Lanes", dense, forward, [](Call& c) { c.v.handle.dtype.lanes = 4; }, {"v.dtype.lanes (4) must be 1"}},
    {"LanesZero", dense, forward, [](Call& c) { c.q.handle.dtype.lanes = 0; }, {"q.dtype.lanes (0) must be 1"}},
    {"Device", dense, forward, [](Call& c) { c.k.handle.device = {TANDEM_CUDA, 0}; },
     {"k.device (type 2, index 0) must be the context's (type 1, index 0)"}},
    {"DeviceUnset", dense, forward, [](Call& c) { c.out.handle.device = {0, 0}; }, {"out.device (type 0"}},
    {"DeviceIndexTensor", packed, forward, [](Call& c) { c.cu_seqlens_k.handle.device.type = 2; }, {"cu_seqlens_k.device"}},
    {"DeviceOther", dense, forward,
     [](Call& c) { c.device = {TANDEM_CUDA, 0}, c.q.handle.device = {TANDEM_CUDA, 1}; },
     {"q.device (type 2, index 1) must be the context's (type 2, index 0)"}},

    // Layout.
    {"LastStride", dense, forward, [](Call& c) { c.q.set_strides({96, 32, 8, 2}); }, {"q.strides[3] (2) must be 1", "head_dim"}},
    {"LastStrideZero", dense, forward, [](Call& c) { c.k.set_strides({80, 16, 8, 0}); }, {"k.strides[3] (0) must be 1"}},
    {"LastStrideDv", dense, backward, [](Call& c) { c.dv.set_strides({60, 12, 1, 2}); }, {"dv.strides[3] (2) must be 1"}},
    {"StrideNegative", dense, forward,
     [](Call& c) { c.device = c.q.handle.device = {TANDEM_CUDA, 0}, c.q.set_strides({96, -32, 8, 1}); },
     {"q.strides[1] (-32) must not be negative on a GPU"}},
    {"StrideNegativeLast", dense, forward, [](Call& c) { c.v.set_strides({60, 12, 6, -1}); }, {"v.strides[3] (-1) must be 1"}},
    {"StrideNegativeOverlap", dense, forward, [](Call& c) { c.out.set_strides({72, -12, 6, 1}); }, {"out.strides (", "overlap"}},
    {"StrideNegativeOverflow", dense, forward, [](Call& c) { c.q.set_strides({-kHuge, -kHuge, 8, 1}); }, {"q.strides (", "2^63"}},
    {"StrideOverflow", dense, forward, [](Call& c) { c.q.set_strides({kHuge, 32, 8, 1}); },
     {"q.strides (4611686018427387904, 32, 8, 1)", "2^63"}},
    {"StrideProductOverflow", dense, forward, [](Call& c) { c.q.set_strides({96, kHuge, 8, 1}); }, {"q.strides (", "2^63"}},
    {"StrideSumOverflow", dense, forward, [](Call& c) { c.k.set_strides({kHuge, kHuge / 4, 8, 1}); }, {"k.strides (", "2^63"}},
    {"ShapeOverflow", dense, forward,
     [](Call& c) {
       c.with_data = false;
       c.q.shape = {INT32_MAX, INT32_MAX, INT32_MAX, 8};
       c.q.handle.shape = c.q.shape.data();
     },
     {"q.shape (2147483647, 2147483647, 2147483647, 8)", "2^63"}},
    {"ShapeOverflowBroadcast", dense, forward,
     [](Call& c) {
       c.with_data = false;
       c.k.shape = {2, INT32_MAX, INT32_MAX, 8};
       c.k.handle.shape = c.k.shape.data();
       c.k.set_strides({0, 0, 0, 1});
     },
     {"k.shape (2, 2147483647, 2147483647, 8)", "2^63"}},
    {"SelfOverlapOut", dense, forward, [](Call& c) { c.out.set_strides({72, 0, 6, 1}); },
     {"out.strides (72, 0, 6, 1)", "make its elements overlap"}},
    {"SelfOverlapDk", dense, backward, [](Call& c) { c.dk.set_strides({80, 15, 8, 1}); }, {"dk.strides (80, 15, 8, 1)"}},
    {"SelfOverlapLse", dense, forward, [](Call& c) { c.lse.set_strides({12, 2, 1}); }, {"lse.strides (12, 2, 1)"}},
    {"SelfOverlapDbias", dense, backward, [](Call& c) { c.dbias.set_strides({60, 0, 5, 1}); }, {"dbias.strides (60, 0"}},
    {"SelfOverlapDsink", dense, backward, [](Call& c) { c.dsink.set_strides({0}); }, {"dsink.strides (0)"}},
    {"Misaligned", dense, forward, [](Call& c) { c.q.handle.byte_offset = 2; }, {"q.data + byte_offset", "multiple of 4"}},
    {"MisalignedData", dense, forward,
     [](Call& c) { c.out.handle.data = reinterpret_cast<char*>(c.out.memory.data()) + 1; },
     {"out.data + byte_offset", "multiple of 4"}},
    {"MisalignedIndex", packed, forward, [](Call& c) { c.cu_seqlens_k.handle.byte_offset = 1; }, {"cu_seqlens_k.data"}},
    {"OffsetWraps", dense, forward, [](Call& c) { c.q.handle.byte_offset = UINT64_MAX - 15; },
     {"q.byte_offset (18446744073709551600)", "address space"}},
    {"OffsetFar", dense, forward, [](Call& c) { c.q.handle.byte_offset = uint64_t{1} << 62; },
     {"q.byte_offset (4611686018427387904)", "address space"}},

    // Rules on shapes that must agree.
    {"BatchK", dense, forward, [](Call& c) { c.k.make({1, 5, 2, 8}, kF32); }, {"k.batch (1) must equal q.batch (2)"}},
    {"HeadDimK", dense, forward, [](Call& c) { c.k.make({2, 5, 2, 4}, kF32); },
     {"k.head_dim (4) must equal q.head_dim (8): pad or slice one of the two tensors"}},
    {"HeadDimZero", dense, forward, [](Call& c) { c.q.make({2, 3, 4, 0}, kF32); }, {"q.head_dim (0) must be 1 to 512"}},
    {"HeadDimLarge", dense, forward, [](Call& c) { c.q.make({2, 3, 4, 513}, kF32); }, {"q.head_dim (513)"}},
    {"HeadDimVZero", dense, forward, [](Call& c) { c.v.make({2, 5, 2, 0}, kF32); }, {"v.head_dim (0) must be 1 to 512"}},
    {"HeadDimVLarge", dense, forward, [](Call& c) { c.v.make({2, 5, 2, 600}, kF32); }, {"v.head_dim (600)"}},
    {"SeqlenV", dense, forward, [](Call& c) { c.v.make({2, 6, 2, 6}, kF32); }, {"v.seqlen (6) must equal k.seqlen (5)"}},
    {"BatchV", dense, forward, [](Call& c) { c.v.make({3, 5, 2, 6}, kF32); }, {"v.batch (3) must equal k.batch (2)"}},
    {"HeadsV", dense, forward, [](Call& c) { c.v.make({2, 5, 4, 6}, kF32); }, {"v.heads (4) must equal k.heads (2)"}},
    {"HeadRatio", dense, forward, [](Call& c) { c.k.make({2, 5, 3, 8}, kF32), c.v.make({2, 5, 3, 6}, kF32); },
     {"q.heads (4) must be a multiple of k.heads (3)"}},
    {"HeadRatioZero", dense, forward, [](Call& c) { c.k.make({2, 5, 0, 8}, kF32), c.v.make({2, 5, 0, 6}, kF32); },
     {"q.heads (4) must be a multiple of k.heads (0)"}},
    {"TotalV", packed, forward, [](Call& c) { c.v.make({6, 2, 6}, kF32); }, {"v.total (6) must equal k.total (7)"}},
    {"OutBatch", dense, forward, [](Call& c) { c.out.make({1, 3, 4, 6}, kF32); }, {"out.batch (1) must equal q.batch (2)"}},
    {"OutSeqlen", dense, forward, [](Call& c) { c.out.make({2, 4, 4, 6}, kF32); }, {"out.seqlen (4) must equal q.seqlen (3)"}},
    {"OutHeads", dense, forward, [](Call& c) { c.out.make({2, 3, 2, 6}, kF32); }, {"out.heads (2) must equal q.heads (4)"}},
    {"OutHeadDim", dense, forward, [](Call& c) { c.out.make({2, 3, 4, 8}, kF32); },
     {"out.head_dim (8) must equal v.head_dim (6)"}},
    {"OutTotal", packed, forward, [](Call& c) { c.out.make({6, 4, 6}, kF32); }, {"out.total (6) must equal q.total (5)"}},
    {"LseShape", dense, forward, [](Call& c) { c.lse.make({2, 3, 4}, kF32); }, {"lse.heads (3) must equal q.heads (4)"}},
    {"LseSeqlen", dense, forward, [](Call& c) { c.lse.make({2, 4, 5}, kF32); }, {"lse.seqlen (5) must equal q.seqlen (3)"}},
    {"LseTotal", packed, forward, [](Call& c) { c.lse.make({4, 6}, kF32); }, {"lse.total (6) must equal q.total (5)"}},
    {"DoutShape", dense, backward, [](Call& c) { c.dout.make({2, 3, 4, 8}, kF32); },
     {"dout.head_dim (8) must equal out.head_dim (6)"}},
    {"DlseShape", dense, backward, [](Call& c) { c.dlse.make({1, 4, 3}, kF32); }, {"dlse.batch (1) must equal q.batch (2)"}},
    {"DqShape", dense, backward, [](Call& c) { c.dq.make({2, 2, 4, 8}, kF32); }, {"dq.seqlen (2) must equal q.seqlen (3)"}},
    {"DkShape", dense, backward, [](Call& c) { c.dk.make({2, 5, 4, 8}, kF32); }, {"dk.heads (4) must equal k.heads (2)"}},
    {"DvShape", packed, backward, [](Call& c) { c.dv.make({5, 2, 6}, kF32); }, {"dv.total (5) must equal v.total (7)"}},

    // Rules of bias, sink, slopes.
    {"BiasShape", dense, forward, [](Call& c) { c.bias.make({2, 2, 3, 5}, kF32); },
     {"bias.heads (2) must be 1 or equal q.heads (4)"}},
    {"BiasBatch", dense, forward, [](Call& c) { c.bias.make({3, 1, 3, 5}, kF32); }, {"bias.batch (3)", "q.batch (2)"}},
    {"BiasQueries", dense, forward, [](Call& c) { c.bias.make({1, 1, 0, 5}, kF32); }, {"bias.seqlen_q (0)", "q.seqlen (3)"}},
    {"BiasKeys", dense, forward, [](Call& c) { c.bias.make({1, 1, 1, 4}, kF32); }, {"bias.seqlen_k (4)", "k.seqlen (5)"}},
    {"BiasPacked", packed, forward, [](Call& c) { c.bias.make({1, 4, 3, 5}, kF32), c.args.bias = &c.bias.handle; },
     {"bias must be NULL with cu_seqlens_q"}},
    {"DbiasShape", dense, backward, [](Call& c) { c.dbias.make({2, 4, 3, 5}, kF32); },
     {"dbias.batch (2) must equal bias.batch (1)"}},
    {"DbiasOfMask", dense, backward, [](Call& c) { c.bias.make({1, 4, 3, 5}, kBool); }, {"dbias must be NULL", "bool"}},
    {"DbiasAlone", dense, backward, [](Call& c) { c.args.bias = nullptr; }, {"dbias must be NULL without bias"}},
    {"SinkShape", dense, forward, [](Call& c) { c.sink.make({2}, kF32); }, {"sink.heads (2) must equal q.heads (4)"}},
    {"DsinkShape", dense, backward, [](Call& c) { c.dsink.make({5}, kF32); }, {"dsink.heads (5) must equal sink.heads (4)"}},
    {"DsinkAlone", dense, backward, [](Call& c) { c.args.sink = nullptr; }, {"dsink must be NULL without sink"}},
    {"AlibiHeads", dense, forward, [](Call& c) { c.alibi_slopes.make({3}, kF32); },
     {"alibi_slopes.heads (3) must equal q.heads (4)"}},
    {"AlibiBatch", dense, forward, [](Call& c) { c.alibi_slopes.make({1, 4}, kF32); }, {"alibi_slopes.batch (1)", "(2)"}},

    // Rules of packed calls.
    {"CuKMissing", packed, forward, [](Call& c) { c.args.cu_seqlens_k = nullptr; }, {"cu_seqlens_k (NULL) must be given"}},
    {"CuQMissing", packed, forward,
     [](Call& c) { c.q.make({2, 3, 4, 8}, kF32), c.args.cu_seqlens_q = nullptr; },
     {"cu_seqlens_q (NULL) must be given"}},
    {"CuEmpty", packed, forward, [](Call& c) { c.cu_seqlens_q.make(std::vector<int32_t>{}); },
     {"cu_seqlens_q.length (0) must be at least 1"}},
    {"CuLengths", packed, forward, [](Call& c) { c.cu_seqlens_k.make({0, 3, 5, 7}); },
     {"cu_seqlens_k.length (4) must equal cu_seqlens_q.length (3)"}},
    {"CuStart", packed, forward, [](Call& c) { c.cu_seqlens_q.make({1, 2, 5}); }, {"cu_seqlens_q[0] (1) must be 0"}},
    {"CuStartNegative", packed, forward, [](Call& c) { c.cu_seqlens_k.make({-1, 3, 7}); }, {"cu_seqlens_k[0] (-1)"}},
    {"CuDecreases", packed, forward, [](Call& c) { c.cu_seqlens_q.make({0, 5, 4}); },
     {"cu_seqlens_q[2] (4) must be at least cu_seqlens_q[1] (5)"}},
    {"CuNegative", packed, forward, [](Call& c) { c.cu_seqlens_q.make({0, INT32_MIN, 5}); }, {"cu_seqlens_q[1] (-2147483648)"}},
    {"CuBeyond", packed, forward, [](Call& c) { c.cu_seqlens_k.make({0, 9, 9}); },
     {"cu_seqlens_k[1] (9) must be at most k.total (7)"}},
    {"CuShort", packed, forward, [](Call& c) { c.cu_seqlens_k.make({0, 3, 6}); },
     {"cu_seqlens_k[2] (6) must equal k.total (7)"}},
    {"MaxSmall", packed, forward, [](Call& c) { c.args.max_seqlen_q = 2; },
     {"max_seqlen_q (2) must be at least 3, the length of sequence 1"}},
    {"MaxSmallK", packed, forward, [](Call& c) { c.args.max_seqlen_k = 3; }, {"max_seqlen_k (3) must be at least 4"}},
    {"MaxNegative", packed, forward, [](Call& c) { c.args.max_seqlen_k = -1; }, {"max_seqlen_k (-1)"}},
    {"MaxDense", dense, forward, [](Call& c) { c.args.max_seqlen_q = 2; }, {"max_seqlen_q (2) must be at least seqlen (3)"}},
    {"MaxOnDevice", packed, forward,
     [](Call& c) {
       c.device = {TANDEM_CUDA, 0};
       for (Held* held : {&c.q, &c.k, &c.v, &c.out, &c.lse, &c.sink, &c.alibi_slopes, &c.cu_seqlens_q, &c.cu_seqlens_k,
                          &c.seqused_q, &c.seqused_k}) {
         held->handle.device = c.device;
       }
       c.args.max_seqlen_q = 3;
     },
     {"max_seqlen_k (0) must be given"}},
    {"UsedShape", dense, forward, [](Call& c) { c.seqused_q.make({3}); }, {"seqused_q.length (1) must be 2"}},
    {"UsedNegative", dense, forward, [](Call& c) { c.seqused_q.make({3, -1}); }, {"seqused_q[1] (-1) must be 0 to 3"}},
    {"UsedBeyond", dense, forward, [](Call& c) { c.seqused_k.make({6, 5}); }, {"seqused_k[0] (6) must be 0 to 5"}},
    {"UsedBeyondOwn", packed, forward, [](Call& c) { c.seqused_k.make({4, 0}); }, {"seqused_k[0] (4) must be 0 to 3"}},

    // Pages.
    {"PagesAndCu", packed, forward,
     [](Call& c) { c.page_table.make({0}), c.args.page_table = &c.page_table.handle; },
     {"cu_seqlens_k must be NULL with page_table"}},
    {"PagesBatch", paged, forward, [](Call& c) { c.page_table.shape = {1, 6}, c.page_table.handle.shape = c.page_table.shape.data(); },
     {"page_table.batch (1) must equal q.batch (2)"}},
    {"PageEmpty", paged, forward, [](Call& c) { c.k.make({6, 0, 2, 8}, kF32), c.v.make({6, 0, 2, 6}, kF32); },
     {"k.page_size (0) must be at least 1"}},
    {"PageSizeV", paged, forward, [](Call& c) { c.v.make({6, 2, 2, 6}, kF32); }, {"v.page_size (2) must equal k.page_size (4)"}},
    {"PageBeyond", paged, forward, [](Call& c) { c.page_table.ints()[4] = 6; },
     {"page_table[1, 1] (6) must be at least 0 and below k.pages (6)"}},
    {"PageNegative", paged, forward, [](Call& c) { c.page_table.ints()[0] = -1; }, {"page_table[0, 0] (-1)"}},
    {"PageBeforeWindow", paged, forward,
     [](Call& c) {
       c.args.window = TANDEM_WINDOW_LEFT;
       c.args.window_left = 1;
       c.seqused_k.make({5, 9});
       c.page_table.ints()[3] = 77;  // keys 0 to 3, before the first visible key
       c.page_table.ints()[4] = 77;
     },
     {"page_table[1, 1] (77) must be at least 0 and below k.pages (6)"}},
    {"PagesLongest", paged, forward, [](Call& c) { c.args.max_seqlen_k = 8; },
     {"seqused_k[1] (9) must be 0 to 8"}},
    {"PagesLongestUnused", paged, forward,
     [](Call& c) { c.args.seqused_k = nullptr, c.args.max_seqlen_k = 11, c.page_table.ints()[2] = 0; },
     {"max_seqlen_k (11) must be at least seqlen (12)"}},
    {"PagesUsed", paged, forward, [](Call& c) { c.seqused_k.make({5, 13}); }, {"seqused_k[1] (13) must be 0 to 12"}},
    {"PagesOverflow", paged, forward,
     [](Call& c) {
       c.with_data = false;
       c.page_table.shape = {2, INT32_MAX};
       c.page_table.handle.shape = c.page_table.shape.data();
     },
     {"page_table.max_pages (2147483647) * k.page_size (4)"}},

    // Rules of shared memory.
    {"OutIsQ", dense, forward, [](Call& c) { c.v.make({2, 5, 2, 8}, kF32), c.out.make({2, 3, 4, 8}, kF32), c.out.lie_in(c.q, 0); },
     {"out.data (byte 0 from q.data) overlaps q"}},
    {"OutInV", dense, forward, [](Call& c) { c.v.memory.resize(400), c.v.handle.data = c.v.memory.data(), c.out.lie_in(c.v, 119); },
     {"out.data (byte 476 from v.data) overlaps v"}},
    {"LseInOut", dense, forward, [](Call& c) { c.lse.lie_in(c.out, 8); }, {"out", "lse", "overlaps"}},
    {"OutInIndex", packed, forward, [](Call& c) { c.out.memory[0] = 0, c.seqused_q.lie_in(c.out, 0); }, {"out", "overlaps seqused_q"}},
    {"OutInBias", dense, forward, [](Call& c) { c.bias.memory.resize(200), c.bias.handle.data = c.bias.memory.data(), c.out.lie_in(c.bias, 4); },
     {"out", "overlaps bias"}},
    {"DqIsQ", dense, backward, [](Call& c) { c.dq.lie_in(c.q, 0); }, {"dq", "overlaps q"}},
    {"DqIsDout", dense, backward, [](Call& c) { c.dout.memory.resize(200), c.dout.handle.data = c.dout.memory.data(), c.dq.lie_in(c.dout, 0); },
     {"dq", "overlaps dout"}},
    {"DkIsDq", dense, backward, [](Call& c) { c.dk.lie_in(c.dq, 16); }, {"dq", "dk", "overlaps"}},
    {"DvIsDk", dense, backward, [](Call& c) { c.dv.lie_in(c.dk, 0); }, {"dk", "dv", "overlaps"}},
    {"DsinkIsSink", dense, backward, [](Call& c) { c.dsink.lie_in(c.sink, 0); }, {"dsink", "overlaps sink"}},
    {"DbiasIsBias", dense, backward, [](Call& c) { c.dbias.lie_in(c.bias, 0); }, {"dbias", "overlaps bias"}},
};

void PrintTo(const Rule& rule, std::ostream* stream) { *stream << rule.name; }

class RuleTest : public testing::TestWithParam<Rule> {};

TEST_P(RuleTest, BrokenIsRefused) {
  const Rule& rule = GetParam();
  Call call;
  (call.*rule.base)();
  call.pass = rule.pass;
  ASSERT_EQ(call.refusal(), "accepted") << "before it was spoilt";
  rule.spoil(call);
  Problem problem;
  const Status status = call.make(&problem);
  EXPECT_EQ(status.code, rule.code);
  for (const char* fragment : rule.says) EXPECT_NE(status.message.find(fragment), std::string::npos) << status.message;
  EXPECT_EQ(status.message.find('\n'), std::string::npos) << status.message;
  EXPECT_LT(status.message.size(), 400u) << status.message;
}

INSTANTIATE_TEST_SUITE_P(All, RuleTest, testing::ValuesIn(rules),
                         [](const testing::TestParamInfo<Rule>& rule) { return std::string(rule.param.name); });

TEST(Rules, NullArgs) {
  Problem problem;
  const Status status = make_problem(TANDEM_FORWARD, nullptr, {TANDEM_CPU, 0}, true, &problem);
  EXPECT_EQ(status.code, TANDEM_INVALID_ARGUMENT);
  EXPECT_NE(status.message.find("args (NULL)"), std::string::npos) << status.message;
}

// The last member of version 0.1's struct. Later bytes must not be read.
TEST(Rules, ShorterStruct) {
  Call call;
  call.dense();
  call.args.size = offsetof(tandem_attention_args, diagonal_offset);
  call.args.diagonal_offset = INT64_MIN;
  call.args.diagonal_offsets = reinterpret_cast<const tandem_tensor*>(1);
  call.args.accumulate = -1;
  call.args.sm_limit = -1;
  for (const tandem_pass pass : {TANDEM_FORWARD, TANDEM_BACKWARD}) {
    call.pass = pass;
    Problem problem;
    const Status status = call.make(&problem);
    EXPECT_TRUE(status.ok()) << status.message;
    EXPECT_FALSE(problem.accumulate);
    EXPECT_EQ(problem.sm_limit, 0);
  }
}

// A struct from before modifications.
TEST(Rules, StructWithoutMods) {
  Call call;
  call.dense();
  call.args.size = offsetof(tandem_attention_args, score_mod);
  call.args.score_mod = call.args.mask_mod = reinterpret_cast<const tandem_mod*>(1);
  Problem problem;
  const Status status = call.make(&problem);
  EXPECT_TRUE(status.ok()) << status.message;
  EXPECT_FALSE(problem.score_mod);
  EXPECT_FALSE(problem.mask_mod);
}

// A struct from before block masks.
TEST(Rules, StructWithoutBlocks) {
  Call call;
  call.dense();
  call.args.size = offsetof(tandem_attention_args, kv_num_blocks);
  call.args.kv_num_blocks = call.args.kv_indices = reinterpret_cast<const tandem_tensor*>(1);
  call.args.mask_block_q = -1;
  Problem problem;
  const Status status = call.make(&problem);
  EXPECT_TRUE(status.ok()) << status.message;
  EXPECT_FALSE(problem.block_mask);
}

// Rows of indices must exist for all blocks, of one head or each.
TEST(Rules, BlockShapes) {
  const auto said = [](const std::vector<int64_t>& counts, const std::vector<int64_t>& indices, int64_t block_q) {
    Call call;
    call.dense();
    Held kv_num_blocks, kv_indices;
    kv_num_blocks.make(counts, kI32);
    kv_indices.make(indices, kI32);
    call.args.kv_num_blocks = call.args.full_kv_num_blocks = &kv_num_blocks.handle;
    call.args.kv_indices = call.args.full_kv_indices = &kv_indices.handle;
    call.args.mask_block_q = block_q;
    call.args.mask_block_k = INT64_MAX;
    Problem problem;
    return call.make(&problem).message;
  };
  EXPECT_EQ(said({2, 4, 2}, {1, 1, 2, 7}, 2), "");
  EXPECT_EQ(said({1, 1, 1}, {2, 4, 1, 1}, INT64_MAX), "");
  EXPECT_EQ(said({1, 1, 3}, {1, 1, 3, 0}, 1), "");
  const auto refused = [&](const std::string& message, const char* part) {
    EXPECT_NE(message.find(part), std::string::npos) << message;
  };
  refused(said({1, 1, 1}, {1, 1, 1, 1}, 2), "kv_num_blocks.blocks (1) must be 2");
  refused(said({1, 1, 2}, {1, 1, 1, 1}, 2), "kv_indices.blocks (1) must be 2");
  refused(said({1, 3, 2}, {1, 1, 2, 1}, 2), "kv_num_blocks.heads (3) must be 1 or equal q.heads (4)");
  refused(said({1, 1, 2}, {3, 1, 2, 1}, 2), "kv_indices.batch (3) must be 1 or equal q.batch (2)");
}

// An unknown tail is an option of a later version.
TEST(Rules, LongerStruct) {
  Call call;
  call.dense();
  struct {
    tandem_attention_args args;
    uint64_t later[4];
  } longer{};
  longer.args = call.args;
  longer.args.size = sizeof longer;
  Problem problem;
  EXPECT_TRUE(make_problem(TANDEM_FORWARD, &longer.args, call.device, true, &problem).ok());
  longer.later[2] = 5;
  const Status status = make_problem(TANDEM_FORWARD, &longer.args, call.device, true, &problem);
  EXPECT_EQ(status.code, TANDEM_UNSUPPORTED);
  const std::string byte = std::to_string(sizeof call.args + 16);
  EXPECT_NE(status.message.find("args byte " + byte + " (5) must be 0"), std::string::npos) << status.message;
}

// The random counter has 32 bits for (sequence, head).
TEST(Rules, DropoutCounter) {
  Call call;
  call.dense();
  call.with_data = false;
  for (Held* held : {&call.q, &call.k, &call.v, &call.out}) held->shape = {1 << 20, 1, 1 << 13, 1};
  for (const auto field :
       {&tandem_attention_args::lse, &tandem_attention_args::bias, &tandem_attention_args::sink,
        &tandem_attention_args::alibi_slopes, &tandem_attention_args::seqused_q, &tandem_attention_args::seqused_k}) {
    call.drop(field);
  }
  ASSERT_EQ(call.refusal(), "accepted");
  call.args.dropout_p = 0.5;
  EXPECT_NE(call.refusal().find("batch (1048576) * q.heads (8192) must be at most 2^32"), std::string::npos)
      << call.refusal();
}

TEST(Rules, PassThatIsNone) {
  Call call;
  call.dense();
  const int32_t value = 7;
  std::memcpy(&call.pass, &value, sizeof value);
  EXPECT_NE(call.refusal().find("pass (7)"), std::string::npos) << call.refusal();
}

}  // namespace
}  // namespace tandem::test
