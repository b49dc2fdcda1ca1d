# find_package(tandem) defines tandem::tandem, the shared library with its headers.
include(${CMAKE_CURRENT_LIST_DIR}/tandemTargets.cmake)
