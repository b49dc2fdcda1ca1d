// Compares options.def with tandem_attention_args: the same members, in the same order, with the same types.
#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "tandem/tandem.h"

namespace tandem {
namespace {

struct ListedArgs {
  int64_t size;
#define TENSOR(member, access, contiguous) const tandem_tensor* member;
#define OPTION(member, type, kind, schema) type member;
#define MEMBER(member, type) type member;
#include "problem/options.def"
};
static_assert(sizeof(ListedArgs) == sizeof(tandem_attention_args), "options.def must list every member of tandem.h");

#define CHECK(member)                                                                                  \
  static_assert(offsetof(ListedArgs, member) == offsetof(tandem_attention_args, member),               \
                "options.def must list the members in the order of tandem.h");                         \
  static_assert(std::is_same_v<decltype(ListedArgs::member), decltype(tandem_attention_args::member)>, \
                "options.def must give each member the type that it has in tandem.h");
#define TENSOR(member, access, contiguous) CHECK(member)
#define OPTION(member, type, kind, schema) CHECK(member)
#define MEMBER(member, type) CHECK(member)
#include "problem/options.def"
#undef CHECK

}  // namespace
}  // namespace tandem
