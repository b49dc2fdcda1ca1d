#include "plan/kernel.h"

#include <algorithm>
#include <stdexcept>
#include <type_traits>

#include "base/text.h"
#include "config/block_mask.h"
#include "plan/fields.h"

namespace tandem::plan {
namespace {

// ---- Names ----

std::string pages_of(int page_rows) { return page_rows > 0 ? str_cat("_pages", page_rows) : ""; }
std::string shape_of(const Sm90ForwardConfig& t) {
  const std::string tma = t.bias_ctas > 0 ? str_cat("_tma", t.bias_ctas) : "";
  const std::string kv = t.kv_ctas > 1 ? str_cat("_kv", t.kv_ctas) : "";
  return str_cat("_", t.tile_m(), "x", t.tile_n, "x", t.stages, tma, kv, pages_of(t.page_rows));
}
std::string shape_of(const Sm100ForwardConfig& t) {
  return str_cat("_", t.q_stage(), "x", t.mma_m(), "x", Sm100ForwardConfig::tile_n, "_fma", t.ex2_emu_pairs,
                 pages_of(t.page_rows));
}

std::string shape_of(const Sm90BackwardConfig& t) {
  return str_cat("_", t.tile_m, "x", t.tile_n(), "x", t.q_stages, "x", t.dout_stages);
}

std::string shape_of(const Sm100BackwardConfig& t) {
  if (t.two_pass()) return str_cat("_", Sm100BackwardConfig::tile_m, "x", t.tile_n(), "_apart", t.ring_blocks());
  return str_cat("_", Sm100BackwardConfig::tile_m, "x", t.tile_n(), "x", t.q_stages, "x", t.dout_stages, "x",
                 t.dq_stages);
}

const char* mark_of(const Field& field, bool on) { return on ? field.mark : ""; }
const char* mark_of(const Field&, int) { return ""; }
const char* mark_of(const Field&, Accumulators) { return ""; }
const char* mark_of(const Field&, Sm90BackwardConfig::Schedule schedule) {
  constexpr const char* kMarks[] = {"", "", "_cluster2", "_warpgroup_roles", "_ds_gmem", "_ds_gmem_sub_m"};
  return kMarks[static_cast<int>(schedule)];
}
const char* mark_of(const Field&, Bias bias) {
  switch (bias) {
    case Bias::none: return "";
    case Bias::boolean: return "_mask";
    case Bias::f32: return "_bias32";
    case Bias::element: return "_bias";
  }
  return "";
}

// ---- Sources ----

std::string source_of(bool on) { return on ? "true" : "false"; }
std::string source_of(int number) { return std::to_string(number); }
std::string source_of(Bias bias) {
  const char* names[] = {"none", "boolean", "f32", "element"};
  return str_cat("Bias::", names[static_cast<int>(bias)]);
}
std::string source_of(Sm90BackwardConfig::Schedule schedule) {
  constexpr const char* kNames[] = {"rs", "shared_p", "cluster2", "warpgroup_roles", "ds_gmem", "ds_gmem_sub_m"};
  return str_cat("Sm90BackwardConfig::Schedule::", kNames[static_cast<int>(schedule)]);
}
std::string source_of(Accumulators accumulators) {
  return accumulators == Accumulators::dk ? "Accumulators::dk" : "Accumulators::both";
}

template <class T>
std::string initialiser_of(const T& configuration) {
  std::string text = "{\n", indent = "    ";
  const auto add = [&](const Field& field, const auto& value) {
    text += str_cat(indent, ".", field.name, " = ", source_of(value), ",\n");
  };
  own_fields(configuration, add);
  text += "    .options = {\n";
  indent += "    ";
  option_fields(configuration.options, add);
  return text + "    }}";
}

// Returns the definitions before a kernel's file: the sizes of matrix products that it needs.
std::string prologue_of(std::initializer_list<int> widths) {
  std::string text;
  int n = 0;
  for (const int width : widths) text += str_cat("#define TANDEM_WGMMA_N", n++, " ", width, "\n");
  return text;
}
std::string prologue_of(const Sm90ForwardConfig& t) { return prologue_of({t.tile_n, t.head_dim_v}); }
std::string prologue_of(const Sm90BackwardConfig& t) {
  if (t.warpgroup_roles()) return prologue_of({t.cta_keys(), t.dk_columns(), t.dv_columns(), t.kDqRest});
  if (t.ds_gmem()) return prologue_of({t.score_queries(), t.dk_columns(), t.dv_columns(), t.head_dim});
  return prologue_of({t.score_queries(), t.dk_columns(), t.dv_columns(), t.dq_columns()});
}
std::string prologue_of(const Sm100ForwardConfig&) { return ""; }
std::string prologue_of(const Sm100BackwardConfig&) { return ""; }

// The file of a kernel, and the types of its configuration and parameter.
struct Source {
  const char *pass, *header, *configuration, *parameter;
};
constexpr Source source_of(const Sm90ForwardConfig&) {
  return {"forward", "sm90/forward/kernel.cuh", "Sm90ForwardConfig", "ForwardParams"};
}
constexpr Source source_of(const Sm100ForwardConfig&) {
  return {"forward", "sm100/forward/kernel.cuh", "Sm100ForwardConfig", "ForwardParams"};
}
constexpr Source source_of(const Sm90BackwardConfig&) {
  return {"backward", "sm90/backward/kernel.cuh", "Sm90BackwardConfig", "BackwardParams"};
}
constexpr Source source_of(const Sm100BackwardConfig&) {
  return {"backward", "sm100/backward/kernel.cuh", "Sm100BackwardConfig", "BackwardParams"};
}
constexpr int ctas_of(const Sm90ForwardConfig& t) { return t.ctas(); }
constexpr int ctas_of(const Sm100ForwardConfig& t) { return t.ctas(); }
constexpr int ctas_of(const Sm90BackwardConfig& t) { return t.ctas(); }
constexpr int ctas_of(const Sm100BackwardConfig& t) { return t.ctas(); }

// An entry that is launched in addition to the kernel, and its threads per CTA.
struct CompanionEntry {
  EntryId id;
  const char* name;
  uint32_t threads;
  int shared_bytes = 0;
  uint32_t sm_threads = 0;  // the least threads that an SM can run at once
};
template <class Forward>
FixedVector<CompanionEntry, kMaxEntries - 1> companion_entries(const Forward& t, Unit) {
  FixedVector<CompanionEntry, kMaxEntries - 1> entries;
  if (t.options.varlen) entries.push_back({EntryId::schedule, "schedule", kScheduleThreads});
  if (t.options.block_mask) {
    entries.push_back({EntryId::list_n_blocks, "list_n_blocks", kListBlocksThreads});
    entries.push_back({EntryId::order_tiles, "order_tiles", kListBlocksThreads});
  }
  if (t.max_scores) entries.push_back({EntryId::max_scores, "max_scores", kMaxScoresThreads});
  if (t.split_keys || t.device_splits)
    entries.push_back({EntryId::combine_splits, "combine_splits", kCombineThreads, kCombineSmemBytes});
  return entries;
}
template <class T>
  requires std::is_same_v<T, Sm90BackwardConfig> || std::is_same_v<T, Sm100BackwardConfig>
FixedVector<CompanionEntry, kMaxEntries - 1> companion_entries(const T& t, Unit unit) {
  FixedVector<CompanionEntry, kMaxEntries - 1> entries;
  const auto threads = static_cast<uint32_t>(t.score_threads());
  if (unit == Unit::prepost) {
    entries.push_back({EntryId::preprocess, "bwd_preprocess", T::kPreprocessThreads});
    entries.push_back({EntryId::postprocess, "bwd_postprocess", static_cast<uint32_t>(t.postprocess_threads()), 0,
                       static_cast<uint32_t>(t.postprocess_sm_threads())});
    entries.push_back({EntryId::dsink, "dsink", 32});
    return entries;
  }
  if (unit == Unit::dbias) {
    entries.push_back({EntryId::dbias, "dbias", threads, t.dbias_smem_bytes()});
    return entries;
  }
  if (t.captured) {
    entries.push_back({EntryId::captured, "captured", threads, t.captured_smem_bytes()});
    entries.push_back({EntryId::postprocess_captured, "postprocess_captured", kPostprocessCapturedThreads});
  }
  if (t.options.block_mask) {
    entries.push_back({EntryId::mark_n_blocks, "mark_n_blocks", kListBlocksThreads});
    entries.push_back({EntryId::list_m_blocks, "list_m_blocks", kListBlocksThreads});
  }
  if constexpr (requires { t.ds_gmem(); }) {
    if (t.ds_gmem()) entries.push_back({EntryId::dq, "dq", static_cast<uint32_t>(t.threads()), t.dq_smem_bytes()});
  }
  return entries;
}

}  // namespace

// Mixed radix: each field is a digit. The type is the last digit.
uint64_t id_of(const Configuration& configuration) {
  uint64_t id = 0;
  std::visit(
      [&id](const auto& t) {
        fields(t, [&id](const Field& field, const auto& value) {
          const auto digit = static_cast<unsigned>((static_cast<int>(value) - field.values.first) / field.values.step);
          id = id * static_cast<unsigned>(field.values.count()) + digit;
        });
      },
      configuration);
  return id * std::variant_size_v<Configuration> + configuration.index();
}

std::string name_of(const Configuration& configuration) {
  return std::visit(
      [](const auto& t) {
        std::string name = str_cat(source_of(t).pass, "_", t.options.f16 ? "f16" : "bf16", "_d", t.head_dim);
        if (t.head_dim_v != t.head_dim) name += str_cat("v", t.head_dim_v);
        name += shape_of(t);
        fields(t, [&name](const Field& field, const auto& value) { name += mark_of(field, value); });
        return name;
      },
      configuration);
}

FixedVector<KernelEntry, kMaxEntries> entries_of(const Configuration& configuration, Unit unit) {
  return std::visit(
      [unit](const auto& t) {
        FixedVector<KernelEntry, kMaxEntries> entries;
        if (unit == Unit::main) entries.push_back({EntryId::main, source_of(t).pass, t.smem_bytes()});
        for (const CompanionEntry& entry : companion_entries(t, unit))
          entries.push_back({entry.id, entry.name, entry.shared_bytes});
        return entries;
      },
      configuration);
}

KernelEntry find_entry(const Configuration& configuration, Unit unit, EntryId id) {
  const auto entries = entries_of(configuration, unit);
  const auto* const found = std::ranges::find(entries, id, &KernelEntry::id);
  if (found == entries.end()) throw std::logic_error("the kernel has no such entry");
  return *found;
}

std::string translation_unit(const Configuration& configuration, const std::string& functions, Unit unit) {
  return std::visit(
      [&functions, unit](const auto& t) {
        const Source source = source_of(t);
        const int ctas = ctas_of(t);
        const std::string cluster = ctas > 1 ? str_cat("__cluster_dims__(", ctas, ", 1, 1) ") : "";
        const char* more = t.options.block_mask                        ? "BlockMasked"
                           : t.options.score_mod || t.options.mask_mod ? "Modified"
                                                                       : "";
        if constexpr (requires { t.bias_ctas; }) more = t.bias_ctas > 0 ? "Biased" : more;
        const char* const header = unit == Unit::prepost ? "prepost/kernel.cuh" : source.header;
        const std::string prologue = unit == Unit::prepost ? "" : prologue_of(t);
        std::string text = str_cat(prologue, "#include \"", header, "\"\n\n", functions, "constexpr ",
                                   source.configuration, " kConfig", initialiser_of(t), ";\n\n");
        const auto add = [&](const char* name, const std::string& attributes, const std::string& threads,
                             uint32_t sm_ctas) {
          text += str_cat("extern \"C\" __global__ void ", attributes, "__launch_bounds__(", threads, ", ", sm_ctas,
                          ") ", name, "(const __grid_constant__ ", more, source.parameter, " p) {\n  ", name,
                          "<kConfig>(p);\n}\n");
        };
        if (unit == Unit::main) add(source.pass, cluster, "kConfig.threads()", 1);
        for (const CompanionEntry& entry : companion_entries(t, unit))
          add(entry.name, "", std::to_string(entry.threads), std::max(entry.sm_threads / entry.threads, uint32_t{1}));
        return text;
      },
      configuration);
}

}  // namespace tandem::plan
