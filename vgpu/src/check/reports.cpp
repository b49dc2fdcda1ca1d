// Texts of findings about memory.
#include "base/text.h"
#include "vgpu/src/check/names.h"
#include "vgpu/src/check/watch.h"

namespace tandem::vgpu::check {
namespace {

struct ReportWords {
  Rule rule;
  std::string message;
};

// site: the site of the other party.
ReportWords words_of(const Accessor& party, const Access::Conflict& conflict, const Accessor& other, const Site& site,
                     const Access& access, Memory memory) {
  const std::string who = name_of(other, party.cta);
  const bool wrote = conflict.other.wrote();
  if (conflict.verdict == Touch::Verdict::unfenced) {
    return {Rule::missing_proxy_fence,
            str_cat(wrote ? "the access uses bytes that " : "the access overwrites bytes that ", who,
                    wrote ? " wrote by ordinary stores" : " read by ordinary loads", ", and no fence.proxy.async of ",
                    memory == Memory::global ? "global" : "shared", " memory lies between the two")};
  }
  if (conflict.verdict == Touch::Verdict::relaxed) {
    return {Rule::relaxed_hand_over,
            str_cat("only relaxed operations order the access after the ", wrote ? "write" : "read", " of ", who)};
  }
  if (conflict.verdict == Touch::Verdict::narrow) {  // no release has a scope that includes the reader
    return {memory == Memory::global ? Rule::data_race : Rule::narrow_release,
            str_cat("the arrival that publishes the write of ", who, " releases to its own block only")};
  }
  if (site.kind == SiteKind::async) {
    const bool own = site.async == AsyncKind::tcgen05_st && access.is_by_warp_of(site);
    return {own ? Rule::pending_store : Rule::missing_wait,
            str_cat("the ", name_of(site.async), " issued by ", who, " may still be ", wrote ? "writing" : "reading",
                    " there: no wait covers the operation")};
  }
  return {Rule::data_race, str_cat("no synchronisation orders ", access.is_async() ? "the issue" : "the access",
                                   " after the ", wrote ? "write" : "read", " of ", who)};
}

}  // namespace

Accessor Watch::party_of(const Actor& actor, int lane, std::string_view does) const {
  return {actor.cta, actor.warp, lane, actor.instruction, std::string(does)};
}

Accessor Watch::party_of(const Site& site, Epoch epoch) const {
  Accessor party{site.cta, site.warp, -1, site.instruction, epoch.wrote() ? "writes" : "reads"};
  if (site.kind == SiteKind::async) {
    party.what = str_cat(name_of(site.async), " ", party.what);
    if (site.lanes && !(site.lanes & (site.lanes - 1))) party.lane = first_of(site.lanes);
  }
  if (epoch.lane() != kTogether) party.lane = epoch.lane();
  return party;
}

std::string Watch::subject_of(Memory memory, uint64_t address) const {
  switch (memory) {
    case Memory::global: return global_name(global_, address);
    case Memory::shared: return shared_name(*launch_.program, address);
    case Memory::tensor: return tensor_name(address % kTensorLanes, address / kTensorLanes);
    case Memory::local: return str_cat("local memory + ", address);
  }
  return "";
}

void Watch::report(const Accessor& party, const Access& access, Memory memory, const Sites& sites) {
  for (const Access::Conflict& conflict : access.conflicts) {
    const Site& site = sites[conflict.other.site()];
    Accessor other = party_of(site, conflict.other);
    ReportWords words = words_of(party, conflict, other, site, access, memory);
    if (!findings_.counts({words.rule, party.cta, party.warp, party.instruction, other.instruction, conflict.address}))
      continue;
    findings_.add(words.rule, party, std::move(other), subject_of(memory, conflict.address), std::move(words.message));
  }
}

void Watch::report_uninitialised(const Accessor& party, Memory memory, uint64_t address) {
  if (!findings_.counts({Rule::uninitialised, party.cta, party.warp, party.instruction, -1, address})) return;
  findings_.add(Rule::uninitialised, party, Accessor(), subject_of(memory, address),
                "the kernel reads bytes that no instruction has written");
}

void Watch::report_bounds(const Actor& actor, int lane, std::string_view does, const Span& span, bool writes) {
  if (!findings_.counts({Rule::out_of_bounds, actor.cta, actor.warp, actor.instruction, -1, span.address})) return;
  std::string message = str_cat("the ", span.bytes, " bytes ");
  if (span.memory == Memory::global && writes && global_.contains(span.address, span.bytes, false)) {
    message += "belong to a buffer that is only to be read";
  } else if (span.memory == Memory::global) {
    message += "do not lie within one buffer";
  } else {
    message += "do not lie within the block's shared memory";
  }
  findings_.add(Rule::out_of_bounds, party_of(actor, lane, does), Accessor(), subject_of(span.memory, span.address),
                std::move(message));
}

}  // namespace tandem::vgpu::check
