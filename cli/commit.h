// The commit from which the command was built.
#pragma once

namespace tandem::tool {

// "4960c616b2a1", "4960c616b2a1-dirty" with changed files, or "unknown" (cmake/Commit.cmake).
const char* commit();

}  // namespace tandem::tool
