# tandem_embed(<target> <folder> <namespace> <function> <ending>...): compiles into a target the text of every
# file of a folder whose name has one of the endings. The folder need not exist yet. std::span<const Text> tandem::<namespace>::<function>() returns
# them, ordered by name (src/base/embedded.h).
#
# This file is also the script that writes that source when a text has changed:
#   cmake -DFOLDER=<folder> -DNAMES=<name,name,...> -DNAMESPACE=<namespace> -DFUNCTION=<function> -DOUTPUT=<file>
#         -P Embed.cmake
function(tandem_embed target folder namespace function)
  get_filename_component(folder ${folder} ABSOLUTE)
  set(output ${CMAKE_CURRENT_BINARY_DIR}/embedded/${function}.cpp)
  list(TRANSFORM ARGN PREPEND ${folder}/* OUTPUT_VARIABLE patterns)
  file(GLOB_RECURSE names CONFIGURE_DEPENDS RELATIVE ${folder} ${patterns})
  list(SORT names)
  list(TRANSFORM names PREPEND ${folder}/ OUTPUT_VARIABLE files)
  list(JOIN names "," names)  # in the command, so that a removed file changes it
  add_custom_command(
    OUTPUT ${output}
    COMMAND ${CMAKE_COMMAND} -DFOLDER=${folder} -DNAMES=${names} -DNAMESPACE=${namespace} -DFUNCTION=${function}
            -DOUTPUT=${output} -P ${TANDEM_EMBED_SCRIPT}
    DEPENDS ${TANDEM_EMBED_SCRIPT} ${files}
    COMMENT "Embedding ${folder}"
    VERBATIM)
  target_sources(${target} PRIVATE ${output})
endfunction()

if(NOT CMAKE_SCRIPT_MODE_FILE)
  set(TANDEM_EMBED_SCRIPT ${CMAKE_CURRENT_LIST_FILE})
  return()
endif()

string(REPLACE "," ";" names "${NAMES}")
set(texts "")
foreach(name IN LISTS names)
  file(SIZE ${FOLDER}/${name} bytes)
  if(bytes GREATER 65000)
    message(FATAL_ERROR "${FOLDER}/${name} (${bytes} bytes) must have at most 65000, to be one string literal")
  endif()
  file(READ ${FOLDER}/${name} text)
  string(APPEND texts "    {\"${name}\"sv, R\"embedded(${text})embedded\"sv},\n")
endforeach()
if(texts)
  set(body "  static constexpr Text texts[] = {\n${texts}  };\n  return texts;\n")
else()
  set(body "  return {};\n")
endif()
file(WRITE ${OUTPUT} "// Written by cmake/Embed.cmake.
#include \"base/embedded.h\"

namespace tandem::${NAMESPACE} {

using namespace std::string_view_literals;

std::span<const Text> ${FUNCTION}();

std::span<const Text> ${FUNCTION}() {
${body}}

}  // namespace tandem::${NAMESPACE}
")
