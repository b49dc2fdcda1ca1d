# Google Highway, headers only: the CPU engine compiles one file per instruction set and links nothing of it.
# Defines tandem::highway. -DTANDEM_HIGHWAY_DIR=/path names the folder that holds hwy/highway.h.
find_path(TANDEM_HIGHWAY_DIR hwy/highway.h NO_CMAKE_FIND_ROOT_PATH
          DOC "Folder that holds hwy/highway.h")
if(NOT TANDEM_HIGHWAY_DIR)
  message(FATAL_ERROR "Tandem needs the headers of Google Highway 1.0.3 or newer. On Debian and Ubuntu: "
                      "apt install libhwy-dev; elsewhere give -DTANDEM_HIGHWAY_DIR=<folder that holds hwy/highway.h>.")
endif()

add_library(tandem_highway INTERFACE)
add_library(tandem::highway ALIAS tandem_highway)
if(CMAKE_CROSSCOMPILING)
  # The host's /usr/include also contains the host's libc headers: the compiler gets a folder with hwy/ only.
  file(MAKE_DIRECTORY ${PROJECT_BINARY_DIR}/highway)
  file(CREATE_LINK ${TANDEM_HIGHWAY_DIR}/hwy ${PROJECT_BINARY_DIR}/highway/hwy SYMBOLIC)
  target_include_directories(tandem_highway SYSTEM INTERFACE ${PROJECT_BINARY_DIR}/highway)
else()
  target_include_directories(tandem_highway SYSTEM INTERFACE ${TANDEM_HIGHWAY_DIR})
endif()
