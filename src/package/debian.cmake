# Debian packages from any build tree, whatever its prefix: `cmake --build <build> --target package`.
# They have install rules of their own, because a Debian package has its libraries elsewhere than
# /usr/local, and only cpack uses them.
find_program(DPKG_EXECUTABLE dpkg)
if(NOT DPKG_EXECUTABLE OR NOT CMAKE_LIBRARY_ARCHITECTURE)
  return() # the machine, or its compiler, is not Debian's
endif()

set(SAGEATTN_PACKAGE_CONTACT "Local build <root@localhost>"
    CACHE STRING "Who builds the Debian packages, as \"Name <address>\"")
set(SAGEATTN_PACKAGE_REVISION 1 CACHE STRING "Debian revision of the packages")
set(CPACK_DEBIAN_PACKAGE_VERSION "${PROJECT_VERSION}-${SAGEATTN_PACKAGE_REVISION}")

set(debian_packages libsageattn0 libsageattn-dev sageattn-tools)
sageattn_install(sageattn-debian "lib/${CMAKE_LIBRARY_ARCHITECTURE}" include libsageattn0
                 libsageattn-dev EXCLUDE_FROM_ALL)
install(TARGETS sageattn-cli DESTINATION bin COMPONENT sageattn-tools EXCLUDE_FROM_ALL)
install(FILES src/package/sageattn.1 DESTINATION share/man/man1 COMPONENT sageattn-tools
        EXCLUDE_FROM_ALL)
install(DIRECTORY examples/data/ DESTINATION share/sageattn/data COMPONENT sageattn-tools
        EXCLUDE_FROM_ALL FILES_MATCHING PATTERN "*.safetensors" PATTERN "README.md")
install(FILES README.md DESTINATION share/doc/libsageattn-dev COMPONENT libsageattn-dev
        EXCLUDE_FROM_ALL)
install(DIRECTORY docs DESTINATION share/doc/libsageattn-dev COMPONENT libsageattn-dev
        EXCLUDE_FROM_ALL)
install(DIRECTORY examples/c examples/cpp DESTINATION share/doc/libsageattn-dev/examples
        COMPONENT libsageattn-dev EXCLUDE_FROM_ALL)

# A changelog's date, which SOURCE_DATE_EPOCH sets.
string(TIMESTAMP date "%a, %d %b %Y %H:%M:%S +0000" UTC)
configure_file(src/package/changelog.in debian/changelog @ONLY)
configure_file(CHANGELOG.md debian/CHANGELOG.md COPYONLY)
foreach(package IN LISTS debian_packages)
  install(FILES src/package/copyright DESTINATION share/doc/${package} COMPONENT ${package}
          EXCLUDE_FROM_ALL)
  install(FILES "${CMAKE_CURRENT_BINARY_DIR}/debian/changelog"
          DESTINATION share/doc/${package} COMPONENT ${package} EXCLUDE_FROM_ALL
          RENAME changelog.Debian)
  install(FILES "${CMAKE_CURRENT_BINARY_DIR}/debian/CHANGELOG.md"
          DESTINATION share/doc/${package} COMPONENT ${package} EXCLUDE_FROM_ALL RENAME changelog)
endforeach()

configure_file(src/package/shlibs.in debian/shlibs @ONLY)
configure_file(src/package/libsageattn0.symbols debian/symbols COPYONLY)
file(WRITE "${CMAKE_CURRENT_BINARY_DIR}/debian/triggers" "activate-noawait ldconfig\n")

set(CPACK_GENERATOR DEB)
set(CPACK_PACKAGE_CONTACT "${SAGEATTN_PACKAGE_CONTACT}")
set(CPACK_PACKAGING_INSTALL_PREFIX /usr)
set(CPACK_INSTALL_DEFAULT_DIRECTORY_PERMISSIONS OWNER_READ OWNER_WRITE OWNER_EXECUTE GROUP_READ
                                                GROUP_EXECUTE WORLD_READ WORLD_EXECUTE)
set(CPACK_STRIP_FILES ON)
set(CPACK_COMPONENTS_ALL ${debian_packages})
set(CPACK_DEB_COMPONENT_INSTALL ON)
# dpkg-shlibdeps runs here and not in CPack, which would add scripts that call ldconfig; a trigger
# does that in all packages' stead.
set(CPACK_PRE_BUILD_SCRIPTS "${CMAKE_CURRENT_SOURCE_DIR}/src/package/debian_stage.cmake")

set(CPACK_DEBIAN_FILE_NAME DEB-DEFAULT) # name_version_architecture.deb
set(CPACK_DEBIAN_PACKAGE_SOURCE libsageattn)
set(CPACK_DEBIAN_PACKAGE_CONTROL_STRICT_PERMISSION ON)
set(CPACK_DEBIAN_LIBSAGEATTN0_PACKAGE_NAME libsageattn0)
set(CPACK_DEBIAN_LIBSAGEATTN0_PACKAGE_SECTION libs)
set(CPACK_DEBIAN_LIBSAGEATTN0_PACKAGE_CONTROL_EXTRA
    "${CMAKE_CURRENT_BINARY_DIR}/debian/shlibs;${CMAKE_CURRENT_BINARY_DIR}/debian/symbols"
    "${CMAKE_CURRENT_BINARY_DIR}/debian/triggers")
set(CPACK_DEBIAN_LIBSAGEATTN-DEV_PACKAGE_NAME libsageattn-dev)
set(CPACK_DEBIAN_LIBSAGEATTN-DEV_PACKAGE_SECTION libdevel)
set(CPACK_DEBIAN_LIBSAGEATTN-DEV_PACKAGE_DEPENDS
    "libsageattn0 (= ${CPACK_DEBIAN_PACKAGE_VERSION})")
set(CPACK_DEBIAN_SAGEATTN-TOOLS_PACKAGE_NAME sageattn-tools)
set(CPACK_DEBIAN_SAGEATTN-TOOLS_PACKAGE_SECTION science)

set(CPACK_PACKAGE_DESCRIPTION_SUMMARY "") # the first line of each description
set(about [[Softmax attention with Q and K quantized to INT8 or INT4 after smoothing, and P
and V to FP8 or FP16, on NVIDIA GPUs from sm_80 and, bit by bit the same
numerics, on the CPU.]])
# No package of Debian main is recommended: NVRTC is NVIDIA's, and found in many places.
set(nvrtc [[GPUs need the NVIDIA driver (libcuda.so.1) and, unless kernels were compiled
ahead of time, NVRTC 12 or 13 (libnvrtc, of any CUDA toolkit or of NVIDIA's
Python wheels). Both are looked for at run time; neither is needed on the CPU.]])
set(CPACK_COMPONENT_LIBSAGEATTN0_DESCRIPTION
    "quantized attention (SageAttention), shared library\n${about}\n\n${nvrtc}")
set(CPACK_COMPONENT_LIBSAGEATTN-DEV_DESCRIPTION
    "quantized attention (SageAttention), development files\n${about}\n
This package has the header, files for CMake and pkg-config, documents and\nexamples.")
set(CPACK_COMPONENT_SAGEATTN-TOOLS_DESCRIPTION
    "quantized attention (SageAttention) on the command line\n${about}\n
The program sageattn attends files, measures what presets cost in accuracy and\ntime, and \
compiles kernels ahead of time.\n\n${nvrtc}")
include(CPack)
