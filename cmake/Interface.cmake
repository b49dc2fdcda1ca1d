# TANDEM_INTERFACE is the version and a digest of the headers whose classes cross between libtandem and libtandem_vgpu.
# Both libraries compare it before any call (src/gpu/virtual_library.h).
set(headers src/base/status.h src/gpu/device.h src/gpu/virtual_library.h)
set(digests "")
foreach(header IN LISTS headers)
  set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS ${header})
  file(SHA256 ${PROJECT_SOURCE_DIR}/${header} digest)
  string(APPEND digests ${digest})
endforeach()
string(SHA256 digest "${digests}")
string(SUBSTRING ${digest} 0 12 digest)
set(TANDEM_INTERFACE "TANDEM_INTERFACE=\"${PROJECT_VERSION} (interface ${digest}\"")
