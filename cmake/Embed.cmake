# tandem_embed(<target> <folder> <function>): compiles the text of every file of a folder (which may not exist yet) into
# a target. tandem::jit::<function>() returns them by name; src/jit/sources.h has the type.
#
# This file is also the script that writes that source when a text has changed:
#   cmake -DFOLDER=<folder> -DNAMES=<name,name,...> -DFUNCTION=<function> -DOUTPUT=<file> -P Embed.cmake
function(tandem_embed target folder function)
  get_filename_component(folder ${folder} ABSOLUTE)
  set(output ${CMAKE_CURRENT_BINARY_DIR}/embedded/${function}.cpp)
  file(GLOB_RECURSE names CONFIGURE_DEPENDS RELATIVE ${folder} ${folder}/*.h ${folder}/*.cuh ${folder}/*.cu)
  list(SORT names)
  list(TRANSFORM names PREPEND ${folder}/ OUTPUT_VARIABLE files)
  list(JOIN names "," names)  # in the command, so that a removed file changes it
  add_custom_command(
    OUTPUT ${output}
    COMMAND ${CMAKE_COMMAND} -DFOLDER=${folder} -DNAMES=${names} -DFUNCTION=${function} -DOUTPUT=${output}
            -P ${TANDEM_EMBED_SCRIPT}
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
#include \"jit/sources.h\"

namespace tandem::jit {

using namespace std::string_view_literals;

Sources ${FUNCTION}();  // of a test's own texts, no header declares it

Sources ${FUNCTION}() {
${body}}

}  // namespace tandem::jit
")
