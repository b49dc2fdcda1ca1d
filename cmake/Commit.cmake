# tandem_commit(<target>) defines const char* tandem::tool::commit() in a target: the commit of the sources,
# "4960c616b2a1", or "4960c616b2a1-dirty" if a file differs. Without git, an exported archive has it; else it is "unknown".
#
# This file is also the script that each build runs. The source is written only if the commit has changed:
#   cmake -DSOURCE=<top folder> -DOUTPUT=<file> [-DCOMMIT=<commit>] -P Commit.cmake
set(TANDEM_COMMIT "" CACHE STRING "Commit that `tandem --version` prints; empty: git's")

function(tandem_commit target)
  set(output ${CMAKE_CURRENT_BINARY_DIR}/commit.cpp)
  add_custom_target(${target}_commit BYPRODUCTS ${output}
                    COMMAND ${CMAKE_COMMAND} -DSOURCE=${PROJECT_SOURCE_DIR} -DOUTPUT=${output} -DCOMMIT=${TANDEM_COMMIT}
                            -P ${TANDEM_COMMIT_SCRIPT}
                    COMMENT "Reading the commit" VERBATIM)
  target_sources(${target} PRIVATE ${output})
  set_source_files_properties(${output} PROPERTIES SKIP_UNITY_BUILD_INCLUSION ON)
  add_dependencies(${target} ${target}_commit)
endfunction()

if(NOT CMAKE_SCRIPT_MODE_FILE)
  set(TANDEM_COMMIT_SCRIPT ${CMAKE_CURRENT_LIST_FILE})
  return()
endif()

set(archived "$Format:%h$")  # `git archive` replaces it, as .gitattributes has it
if(NOT COMMIT AND EXISTS ${SOURCE}/.git)
  execute_process(COMMAND git describe --always --dirty --abbrev=12 --exclude=* WORKING_DIRECTORY ${SOURCE}
                  OUTPUT_VARIABLE COMMIT OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
endif()
if(NOT COMMIT AND NOT archived MATCHES "Format")
  set(COMMIT ${archived})
endif()
if(NOT COMMIT)
  set(COMMIT unknown)
endif()
set(text "// Written by cmake/Commit.cmake.
#include \"cli/commit.h\"

namespace tandem::tool {

const char* commit() { return \"${COMMIT}\"; }

}  // namespace tandem::tool
")
set(before "")
if(EXISTS ${OUTPUT})
  file(READ ${OUTPUT} before)
endif()
if(NOT before STREQUAL text)
  file(WRITE ${OUTPUT} "${text}")
endif()
