# Compiles for an old C library with Zig. The Python package `ziglang` contains Clang, libc++ and the symbols of each glibc.
#   -DTANDEM_ZIG_TARGET=x86_64-linux-gnu.2.28 (or aarch64) -DTANDEM_ZIG_TOOLS=<folder of cc, c++, ar and ranlib>
# packaging/build_wheels.py writes that folder. Libraries are stripped and contain no path of the building machine.
set(CMAKE_TRY_COMPILE_PLATFORM_VARIABLES TANDEM_ZIG_TARGET TANDEM_ZIG_TOOLS)
set(CMAKE_SYSTEM_NAME Linux)
string(REGEX REPLACE "-.*" "" CMAKE_SYSTEM_PROCESSOR ${TANDEM_ZIG_TARGET})
set(CMAKE_C_COMPILER ${TANDEM_ZIG_TOOLS}/cc)
set(CMAKE_CXX_COMPILER ${TANDEM_ZIG_TOOLS}/c++)
set(CMAKE_AR ${TANDEM_ZIG_TOOLS}/ar)
set(CMAKE_RANLIB ${TANDEM_ZIG_TOOLS}/ranlib)
foreach(language C CXX)
  set(CMAKE_${language}_COMPILER_TARGET ${TANDEM_ZIG_TARGET})
  set(CMAKE_${language}_FLAGS_INIT "-g0 -ffile-prefix-map=${CMAKE_SOURCE_DIR}=.")
endforeach()
foreach(kind SHARED MODULE EXE)
  set(CMAKE_${kind}_LINKER_FLAGS_INIT "-Wl,-s")
endforeach()
