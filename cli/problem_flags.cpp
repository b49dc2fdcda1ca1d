// The flags that describe a problem, and named problems.
#include <numeric>

#include "cli/flags.h"

namespace tandem::tool {
namespace {

constexpr const char* scores_group = "Scores and masks";

Buffer cumulative(const std::vector<int64_t>& lengths) {
  Buffer result(DType::i32, {static_cast<int64_t>(lengths.size()) + 1});
  int64_t sum = 0;
  result.set(0, 0);
  for (size_t b = 0; b < lengths.size(); ++b) {
    sum += lengths[b];
    result.set(static_cast<int64_t>(b) + 1, checked_index(sum, "--lengths-q or --lengths-k, summed,"));
  }
  return result;
}

int64_t total(const std::vector<int64_t>& lengths) {
  return std::accumulate(lengths.begin(), lengths.end(), int64_t{0});
}

void shape(ProblemFlags& flags, int64_t heads_q, int64_t heads_k, int64_t head_dim, int64_t seqlen) {
  flags.heads_q = heads_q;
  flags.heads_k = heads_k;
  flags.head_dim = head_dim;
  flags.seqlen_q = seqlen;
  flags.mask.causal = true;
}

constexpr Preset all_presets[] = {
    {"llama", "Llama 3.1 70B: 64/8 heads of 128, causal, 8192", [](ProblemFlags& f) { shape(f, 64, 8, 128, 8192); }},
    {"gpt-oss", "GPT-OSS: 64/8 heads of 64, causal, sinks, 8192",
     [](ProblemFlags& f) {
       shape(f, 64, 8, 64, 8192);
       f.sink = true;
     }},
    {"gpt-oss-window", "GPT-OSS, the layers with a window of 128",
     [](ProblemFlags& f) {
       shape(f, 64, 8, 64, 8192);
       f.sink = true;
       f.mask.window = "127,0";
     }},
    {"qwen", "Qwen3-Next: 32/2 heads of 256, causal, 8192", [](ProblemFlags& f) { shape(f, 32, 2, 256, 8192); }},
    {"deepseek", "DeepSeek-V3 prefill: 128 heads of 192 and 128, causal, 4096",
     [](ProblemFlags& f) {
       shape(f, 128, 128, 192, 4096);
       f.head_dim_v = 128;
     }},
    {"video", "A video model: 24 heads of 128, full, 32768",
     [](ProblemFlags& f) {
       shape(f, 24, 24, 128, 32768);
       f.mask.causal = false;
     }},
};

}  // namespace

std::span<const Preset> presets() { return all_presets; }

void ProblemFlags::add_presets_to(Command app) {
  std::vector<std::string> names;
  for (const Preset& preset : presets()) names.emplace_back(preset.name);
  const auto apply = [this](const std::string& name) {
    for (const Preset& preset : presets()) {
      if (name == preset.name) preset.apply(*this);
    }
  };
  app.option("--preset", apply, "Sizes and mask of a model; other flags change them").one_of(names).group("Shape");
}

void ProblemFlags::add_to(Command app) {
  app.option("--dtype", dtype, "f32, bf16, f16 or f64").show_default();
  const auto size = [&](const char* flag, int64_t& value, const char* text) {
    app.option(flag, value, text).at_least_zero().group("Shape");
  };
  size("--batch", batch, "Sequences [1]");
  size("--heads-q,--heads", heads_q, "Query heads [8]");
  size("--heads-k", heads_k, "Key and value heads [as --heads-q]");
  size("--seqlen-q,--seqlen", seqlen_q, "Queries of a sequence [512]");
  size("--seqlen-k", seqlen_k, "Keys of a sequence [as --seqlen-q]");
  size("--head-dim", head_dim, "Size of a query and a key [64]");
  size("--head-dim-v", head_dim_v, "Size of a value [as --head-dim]");
  app.option("--lengths-q", lengths_q, "Packed: queries of each sequence")
      .separated_by_commas()
      .at_least_zero()
      .group("Shape");
  app.option("--lengths-k", lengths_k, "Packed: keys of each sequence [as --lengths-q]")
      .separated_by_commas()
      .at_least_zero()
      .group("Shape")
      .needs("--lengths-q");
  mask.add_to(app);
  app.option("--bias", bias, "A bias per head: f32, same (as q) or bool")
      .one_of({"f32", "same", "bool"})
      .group(scores_group);
  app.flag("--sink", sink, "A sink per head").group(scores_group);
  app.option("--dropout", mask.dropout, "Probability that an entry of P becomes 0 [0]")
      .probability()
      .group(scores_group);
}

Inputs ProblemFlags::random_inputs(Random& random, double magnitude) const {
  const auto make = [&](DType type, const std::vector<int64_t>& shape, double scale) {
    if (type != DType::boolean) return random_buffer(random, type, shape, scale);
    const Buffer numbers = random_buffer(random, DType::f32, shape);
    Buffer shown(type, shape);
    for (int64_t i = 0; i < numbers.count(); ++i) shown.set(i, numbers.get(i) > -0.5);
    return shown;
  };
  return inputs(make, magnitude);
}

Inputs ProblemFlags::inputs(const Make& make, double magnitude) const {
  const DType type = dtype_from(dtype);
  const bool packed = !lengths_q.empty();
  const int64_t keys = seqlen_k > 0 ? seqlen_k : seqlen_q, dim_v = head_dim_v > 0 ? head_dim_v : head_dim;
  const std::vector<int64_t>& key_lengths = lengths_k.empty() ? lengths_q : lengths_k;
  const auto of_queries = [&](int64_t dim) {
    return packed ? std::vector{total(lengths_q), heads_q, dim} : std::vector{batch, seqlen_q, heads_q, dim};
  };
  const auto of_keys = [&](int64_t dim) {
    const int64_t heads = heads_k > 0 ? heads_k : heads_q;
    return packed ? std::vector{total(key_lengths), heads, dim} : std::vector{batch, keys, heads, dim};
  };
  Inputs in;
  in.q = make(type, of_queries(head_dim), magnitude);
  in.k = make(type, of_keys(head_dim), 1);
  in.v = make(type, of_keys(dim_v), 1);
  in.dout = make(type, of_queries(dim_v), 1);
  if (packed) {
    in.cu_seqlens_q = cumulative(lengths_q);
    in.cu_seqlens_k = cumulative(key_lengths);
  }
  if (sink) in.sink = make(DType::f32, {heads_q}, 1);
  if (!bias.empty())
    in.bias = make(bias == "bool"   ? DType::boolean
                   : bias == "same" ? type
                                    : DType::f32,
                   {1, heads_q, seqlen_q, keys}, 1);
  mask.fill(in);
  return in;
}

}  // namespace tandem::tool
