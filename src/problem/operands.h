// Operands: the tensors of a call, each checked separately and read into one plain form.
//
// One table names the tensors and lists the passes that read or write them. read_operand() holds the rules of every
// tensor. problem.cpp has the rules between tensors.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "base/status.h"
#include "problem/problem.h"

namespace tandem {

enum class Use : uint8_t { none, read, write };

using Args = tandem_attention_args;
using Field = const tandem_tensor* Args::*;

struct OperandInfo {
  const char* name;
  Field field;
  Use forward, backward;

  Use in(tandem_pass pass) const { return pass == TANDEM_FORWARD ? forward : backward; }
};

inline constexpr OperandInfo kOperands[] = {
    {"q", &Args::q, Use::read, Use::read},
    {"k", &Args::k, Use::read, Use::read},
    {"v", &Args::v, Use::read, Use::read},
    {"out", &Args::out, Use::write, Use::read},
    {"lse", &Args::lse, Use::write, Use::read},
    {"dout", &Args::dout, Use::none, Use::read},
    {"dlse", &Args::dlse, Use::none, Use::read},
    {"dq", &Args::dq, Use::none, Use::write},
    {"dk", &Args::dk, Use::none, Use::write},
    {"dv", &Args::dv, Use::none, Use::write},
    {"bias", &Args::bias, Use::read, Use::read},
    {"dbias", &Args::dbias, Use::none, Use::write},
    {"sink", &Args::sink, Use::read, Use::read},
    {"dsink", &Args::dsink, Use::none, Use::write},
    {"alibi_slopes", &Args::alibi_slopes, Use::read, Use::read},
    {"cu_seqlens_q", &Args::cu_seqlens_q, Use::read, Use::read},
    {"cu_seqlens_k", &Args::cu_seqlens_k, Use::read, Use::read},
    {"seqused_q", &Args::seqused_q, Use::read, Use::read},
    {"seqused_k", &Args::seqused_k, Use::read, Use::read},
    {"page_table", &Args::page_table, Use::read, Use::read},
    {"diagonal_offsets", &Args::diagonal_offsets, Use::read, Use::read},
    {"kv_num_blocks", &Args::kv_num_blocks, Use::read, Use::read},
    {"kv_indices", &Args::kv_indices, Use::read, Use::read},
    {"full_kv_num_blocks", &Args::full_kv_num_blocks, Use::read, Use::read},
    {"full_kv_indices", &Args::full_kv_indices, Use::read, Use::read},
    {"max_scores", &Args::max_scores, Use::write, Use::none},
    {"places", &Args::places, Use::read, Use::read},
};
inline constexpr int kOperandCount = sizeof kOperands / sizeof kOperands[0];
inline constexpr int kMaxRank = 4;

struct Operand {
  const char* name = nullptr;
  bool present = false, empty = false;
  DType dtype = DType::f32;
  int rank = 0;
  const char* dim_name[kMaxRank] = {};
  int64_t shape[kMaxRank] = {};
  int64_t stride[kMaxRank] = {};  // elements; 0 if the size is 0 or 1
  std::byte* data = nullptr;      // NULL in a call without data
  int64_t bytes = 0;              // from the lowest element to the end of the highest element
  int64_t below = 0;              // bytes before data, which negative strides reach

  const std::byte* first() const { return data - below; }
};

struct OperandStep {
  int64_t stride = 0, count = 0;
};

// Fills in the dimensions of more than one element in order of falling |stride|, and returns their number.
int steps_of(const Operand& operand, OperandStep (&steps)[kMaxRank]);

// A set of DType.
using DTypes = uint32_t;
constexpr DTypes only(DType t) { return 1u << static_cast<uint32_t>(t); }
inline constexpr DTypes kFloats = only(DType::f64) | only(DType::f32) | only(DType::bf16) | only(DType::f16);

// The name of a dimension, and optionally its size, the reason, and the owner: the tensor with the same dimension (or
// NULL).
struct Dim {
  const char* name;
  int64_t size = -1;  // -1: any
  const char* owner = nullptr;
  const char* why = "";
};

struct OperandRule {
  const OperandInfo& info;
  DTypes dtypes;
  const char* dtype_why;
  std::span<const Dim> dims;
  const char* dims_why;  // follows the list of dimensions when the rank is wrong
  bool contiguous_last;  // the last stride must be 1
};

struct ReadMode {
  tandem_pass pass;
  tandem_device device;
  bool with_data;
  int64_t bias_keys = -1;  // a shard of context parallelism: the longest document
};

// Checks the tensor against the rule and the rules of all tensors: device, sizes, strides, overflow and, with data,
// null and misaligned pointers. Elements of a written tensor must not overlap each other.
Status read_operand(const tandem_tensor& tensor, const OperandRule& rule, const ReadMode& mode, Operand* operand);

// The rule of a tensor of a call without passes, such as a merge.
struct OperandFormat {
  DTypes dtypes;
  const char* dtype_why;
  std::span<const Dim> dims;
  const char* dims_why = "";
  bool contiguous_last = false;
};
Status read_operand(const char* name, Use use, const tandem_tensor& tensor, const OperandFormat& format,
                    tandem_device device, Operand* operand);

// A tensor that read_operand() has accepted, without a name.
Operand operand_of(const tandem_tensor& tensor);

// (batch, row, head, dim), or packed (row, head, dim); and of one value per row (batch, head, row), or packed (head,
// row).
View view_of(const Operand& operand);
View lse_view_of(const Operand& operand);

// Returns true if a byte belongs to elements of both operands. The result is exact for views whose strides nest, such
// as q, k and v interleaved in one buffer. For other views the result may be true without an overlap, but never false
// with one.
bool overlap(const Operand& a, const Operand& b);

// Returns the name of a tensor of a valid call whose memory overlaps [begin, begin + bytes), or NULL.
const char* operand_in_range(tandem_pass pass, const tandem_attention_args& args, const void* begin, size_t bytes);

}  // namespace tandem
