# The installed files: the libraries, the headers, the command, and what CMake and pkg-config need to find them.
include(CMakePackageConfigHelpers)

set(package_dir ${CMAKE_INSTALL_LIBDIR}/cmake/tandem)

install(TARGETS tandem EXPORT tandemTargets
        LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR}
        INCLUDES DESTINATION ${CMAKE_INSTALL_INCLUDEDIR})
# libtandem loads it by its soname from its own folder; no program links with it.
install(TARGETS tandem_vgpu LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR} NAMELINK_SKIP)
if(TARGET tandem_command)
  install(TARGETS tandem_command RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR})
endif()
# `tandem vgpu exec` looks for them there.
install(TARGETS tandem_virtual_cuda tandem_virtual_cudart LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR}/tandem/virtual_cuda)
install(DIRECTORY ${PROJECT_SOURCE_DIR}/include/tandem DESTINATION ${CMAKE_INSTALL_INCLUDEDIR})
install(EXPORT tandemTargets NAMESPACE tandem:: DESTINATION ${package_dir})

write_basic_package_version_file(${PROJECT_BINARY_DIR}/tandemConfigVersion.cmake COMPATIBILITY SameMinorVersion)
file(RELATIVE_PATH prefix_from_pc /prefix/${CMAKE_INSTALL_LIBDIR}/pkgconfig /prefix)
string(REGEX REPLACE "/$" "" prefix_from_pc ${prefix_from_pc})
configure_file(${CMAKE_CURRENT_LIST_DIR}/tandem.pc.in ${PROJECT_BINARY_DIR}/tandem.pc @ONLY)
install(FILES ${CMAKE_CURRENT_LIST_DIR}/tandemConfig.cmake ${PROJECT_BINARY_DIR}/tandemConfigVersion.cmake
        DESTINATION ${package_dir})
install(FILES ${PROJECT_BINARY_DIR}/tandem.pc DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig)

install(FILES ${PROJECT_SOURCE_DIR}/LICENSE ${PROJECT_SOURCE_DIR}/CHANGELOG.md DESTINATION ${CMAKE_INSTALL_DOCDIR})
if(TARGET tandem_command AND EXISTS ${PROJECT_SOURCE_DIR}/examples/minilm)  # `tandem demo` looks for them there
  install(DIRECTORY ${PROJECT_SOURCE_DIR}/examples/minilm DESTINATION ${CMAKE_INSTALL_DATADIR}/tandem
          FILES_MATCHING PATTERN *.safetensors PATTERN *.txt PATTERN README.md)
endif()

# Builds what `cmake --install` copies, without tests and benchmarks.
add_custom_target(installed DEPENDS tandem tandem_vgpu tandem_virtual_cuda tandem_virtual_cudart)
if(TARGET tandem_command)
  add_dependencies(installed tandem_command)
endif()

# `cpack` in the build folder writes a Debian package. dpkg-shlibdeps (package dpkg-dev) computes its dependencies.
if(PROJECT_IS_TOP_LEVEL)
  set(CPACK_GENERATOR DEB)
  set(CPACK_PACKAGE_NAME tandem)
  set(CPACK_PACKAGE_CONTACT "The Tandem authors <tandem@localhost>")
  set(CPACK_PACKAGE_DESCRIPTION_SUMMARY ${PROJECT_DESCRIPTION})
  set(CPACK_PACKAGE_DESCRIPTION "Libraries, headers and command of the Tandem attention library for CPUs and NVIDIA GPUs.")
  set(CPACK_PACKAGE_FILE_NAME tandem_${PROJECT_VERSION}_${CMAKE_SYSTEM_PROCESSOR})
  set(CPACK_PACKAGING_INSTALL_PREFIX /usr)
  set(CPACK_STRIP_FILES ON)
  set(CPACK_DEBIAN_FILE_NAME DEB-DEFAULT)
  set(CPACK_DEBIAN_PACKAGE_SECTION libs)
  set(CPACK_DEBIAN_PACKAGE_SHLIBDEPS ON)
  set(CPACK_DEBIAN_PACKAGE_SHLIBDEPS_PRIVATE_DIRS ${PROJECT_BINARY_DIR}/src ${PROJECT_BINARY_DIR}/virtual_cuda)
  file(WRITE ${PROJECT_BINARY_DIR}/triggers "activate-noawait ldconfig\n")
  set(CPACK_DEBIAN_PACKAGE_CONTROL_EXTRA ${PROJECT_BINARY_DIR}/triggers)
  include(CPack)
endif()
