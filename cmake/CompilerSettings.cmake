# Language level, optimisation, warnings and sanitizers for all of Tandem's own code.
set(CMAKE_CXX_STANDARD 20)
set(CMAKE_CXX_STANDARD_REQUIRED ON)
set(CMAKE_CXX_EXTENSIONS OFF)
set(CMAKE_C_STANDARD 11)
set(CMAKE_C_STANDARD_REQUIRED ON)
set(CMAKE_POSITION_INDEPENDENT_CODE ON)
set(CMAKE_CXX_VISIBILITY_PRESET hidden)
set(CMAKE_VISIBILITY_INLINES_HIDDEN ON)
if(PROJECT_IS_TOP_LEVEL)
  set(CMAKE_EXPORT_COMPILE_COMMANDS ON)
endif()

get_property(multi_config GLOBAL PROPERTY GENERATOR_IS_MULTI_CONFIG)
if(NOT CMAKE_BUILD_TYPE AND NOT multi_config)
  set(CMAKE_BUILD_TYPE Release CACHE STRING "Debug, Release, RelWithDebInfo or MinSizeRel" FORCE)
endif()

if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU" AND CMAKE_CXX_COMPILER_VERSION VERSION_LESS 12)
  message(FATAL_ERROR "Tandem needs GCC 12 or newer, or Clang 16 or newer; "
                      "${CMAKE_CXX_COMPILER} is GCC ${CMAKE_CXX_COMPILER_VERSION}. Choose one with CXX=g++-12.")
elseif(CMAKE_CXX_COMPILER_ID STREQUAL "Clang" AND CMAKE_CXX_COMPILER_VERSION VERSION_LESS 16)
  message(FATAL_ERROR "Tandem needs Clang 16 or newer, or GCC 12 or newer; "
                      "${CMAKE_CXX_COMPILER} is Clang ${CMAKE_CXX_COMPILER_VERSION}. Choose one with CXX=clang++-16.")
endif()

add_compile_options(-Wall -Wextra -Wpedantic -Wshadow)
if(TANDEM_WERROR)
  add_compile_options(-Werror)
endif()

# -O3 is for loops over many numbers. Other code is compiled with -O2, which takes a quarter less time.
set(TANDEM_INNER_LOOPS $<$<CONFIG:Release>:-O3>)
add_compile_options($<$<CONFIG:Release>:-O2>)

# For code of which each line runs once or so: hardly optimised, and with sanitizers, which take long to optimise, not at
# all. Unoptimised builds stay so. With sanitizers this also holds for libraries whose tests need few loops.
set(TANDEM_RUNS_ONCE $<$<NOT:$<CONFIG:Debug>>:-O1>)
if(TANDEM_SANITIZE)
  set(TANDEM_RUNS_ONCE -O0)
  set(TANDEM_FEW_LOOPS -O0)
endif()

if(TANDEM_SANITIZE)
  add_compile_options(-fsanitize=${TANDEM_SANITIZE} -fno-sanitize-recover=all -fno-omit-frame-pointer -g1)  # lines, for reports
  add_link_options(-fsanitize=${TANDEM_SANITIZE})
  add_library(tandem_sanitizer_options OBJECT ${CMAKE_CURRENT_LIST_DIR}/sanitizer_options.c)
  link_libraries($<$<STREQUAL:$<TARGET_PROPERTY:TYPE>,EXECUTABLE>:$<TARGET_OBJECTS:tandem_sanitizer_options>>)
endif()
if(TANDEM_BUILD_FUZZERS AND NOT CMAKE_CXX_COMPILER_ID STREQUAL "Clang")
  message(FATAL_ERROR "The fuzz targets use libFuzzer, which comes with Clang: cmake --preset asan.")
endif()
if(TANDEM_COVERAGE)
  if(NOT CMAKE_CXX_COMPILER_ID STREQUAL "Clang")
    message(FATAL_ERROR "TANDEM_COVERAGE uses Clang's source-based coverage: cmake --preset asan.")
  endif()
  add_compile_options(-fprofile-instr-generate -fcoverage-mapping)
  add_link_options(-fprofile-instr-generate)
endif()

# Links a shared library; the map lists the symbols that it exports.
function(tandem_shared_library name map)
  target_link_options(${name} PRIVATE -Wl,--version-script=${map})
  if(NOT TANDEM_SANITIZE)  # Clang resolves its sanitizers only in the program
    target_link_options(${name} PRIVATE -Wl,--no-undefined)
  endif()
  if(TANDEM_BUILD_PYTHON)
    # The wheel must load with older C++ libraries. Unused sections are removed, because they may need a newer C library.
    target_link_options(${name} PRIVATE -static-libstdc++ -Wl,--gc-sections)
  endif()
  set_target_properties(${name} PROPERTIES VERSION ${PROJECT_VERSION} SOVERSION ${PROJECT_VERSION_MAJOR}
                                           LINKER_LANGUAGE CXX LINK_DEPENDS ${map})
endfunction()

find_program(CCACHE ccache)
mark_as_advanced(CCACHE)
if(CCACHE AND NOT CMAKE_CXX_COMPILER_LAUNCHER)
  set(CMAKE_C_COMPILER_LAUNCHER ${CCACHE})
  set(CMAKE_CXX_COMPILER_LAUNCHER ${CCACHE})
endif()
