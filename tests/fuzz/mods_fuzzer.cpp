// Reads any text as a score_mod and as a mask_mod. The text is refused with a sentence, or evaluated with all its
// derivatives. Positions are far and near, and no element beyond the tensors is read.
#include <cstdlib>
#include <string>
#include <string_view>
#include <vector>

#include "score_mod/evaluate.h"
#include "score_mod/options.h"
#include "score_mod/program.h"

namespace {

using namespace tandem::score_mod;

// Elements end with their allocation, so that the address sanitizer sees a read beyond them.
struct Bound {
  std::vector<float> slope = {0.5f, -2, 0.25f}, table = std::vector<float>(3 * 5, 1.5f), one = {0.75f};
  std::vector<int32_t> doc = {0, 0, 1, 1, 2, -7};
  std::vector<uint8_t> seen = {0, 1, 1};
  Values values{.scalars = {1.25, -3, 1}, .tensors = {}};

  Bound() {
    add(slope.data(), Element::f32, {3}), add(table.data(), Element::f32, {3, 5}), add(one.data(), Element::f32, {});
    add(doc.data(), Element::i32, {2, 3}), add(seen.data(), Element::boolean, {3});
  }

  void add(const void* data, Element element, const std::vector<int32_t>& sizes) {
    TensorView view{
        .data = static_cast<const std::byte*>(data), .element = element, .rank = static_cast<int32_t>(sizes.size())};
    int64_t stride = 1;
    for (size_t i = sizes.size(); i-- > 0; stride *= sizes[i]) view.size[i] = sizes[i], view.stride[i] = stride;
    values.tensors.push_back(view);
  }
};

Signature signature(bool mask) {
  return {.result = mask ? Signature::Result::mask : Signature::Result::score,
          .scalars = {{"c", Type::real}, {"n", Type::integer}, {"on", Type::boolean}},
          .tensors = {{"slope", Type::real, 1},
                      {"table", Type::real, 2},
                      {"one", Type::real, 0},
                      {"doc", Type::integer, 2},
                      {"seen", Type::boolean, 1}}};
}

void require(bool holds) {
  if (!holds) std::abort();
}

void run(const TileProgram& program, const Bound& bound) {
  static constexpr float kScores[] = {0, -1.5f, 3e38f, -__builtin_inff(), __builtin_nanf("")};
  static constexpr int32_t kPlaces[] = {0, 2, 1000, INT32_MAX, INT32_MIN};
  std::vector<float> memory(program.floats());
  TileRun tiles(program, bound.values, memory.data());
  tiles.begin({.batch = 1, .seqlen_q = 9, .seqlen_k = INT32_MAX});
  tiles.run({5, kScores, kPlaces, kPlaces, kPlaces});
}

void evaluate(const Program& program, const Bound& bound) {
  std::vector<NodeId> outputs = program.capturing;
  outputs.push_back(program.mod.result);
  outputs.push_back(program.gradient.score);
  Evaluator<double> wide(program.mod.graph, outputs);
  for (const int32_t place : {0, 4, INT32_MIN}) {
    wide.run(0.5, {.batch = place, .head = 1, .q = place, .k = 3, .seqlen_q = 7, .seqlen_k = 8}, bound.values);
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static const Bound bound;
  const std::string text(reinterpret_cast<const char*>(data), size);
  for (const bool mask : {false, true}) {
    Mod mod;
    const tandem::Status status = parse(text, signature(mask), &mod);
    require(status.ok() != !status.message.empty());
    if (!status.ok()) continue;
    require(mod.graph[mod.result].type == (mask ? Type::boolean : Type::real));
    for (const Lengths& lengths : {Lengths{9, 8, true}, {INT32_MAX, 1, false}}) {
      band_of(mod, bound.values, lengths);
      alibi_of(mod, bound.values, lengths);
    }
    const Program program(std::move(mod));
    evaluate(program, bound);
    for (const TileProgram* tiles : {&program.result_tiles, &program.slope_tiles, &program.capture_tiles}) {
      run(*tiles, bound);
    }
  }
  return 0;
}
