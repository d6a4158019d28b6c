# Run by CPack in its own scope, on the files of all packages before they are packed: compresses what
# Debian wants compressed, and finds the libraries that the programs need.
file(GLOB documents "${CPACK_TEMPORARY_DIRECTORY}/*/usr/share/doc/*/changelog*")
file(GLOB manuals "${CPACK_TEMPORARY_DIRECTORY}/*/usr/share/man/*/*.1")
execute_process(COMMAND gzip -9n ${documents} ${manuals} COMMAND_ERROR_IS_FATAL ANY)

find_program(dpkg_shlibdeps dpkg-shlibdeps)
if(NOT dpkg_shlibdeps)
  message(FATAL_ERROR "dpkg-shlibdeps is missing: install dpkg-dev")
endif()
set(scratch "${CPACK_TEMPORARY_DIRECTORY}/../shlibdeps")
file(WRITE "${scratch}/debian/control" "") # which it wants to see
foreach(package IN ITEMS libsageattn0 sageattn-tools)
  file(GLOB binaries "${CPACK_TEMPORARY_DIRECTORY}/${package}/usr/lib/*/lib*.so.*.*"
                     "${CPACK_TEMPORARY_DIRECTORY}/${package}/usr/bin/*")
  set(control "${CPACK_TEMPORARY_DIRECTORY}/${package}/DEBIAN") # by which it knows a package's root
  file(MAKE_DIRECTORY "${control}")
  execute_process(COMMAND "${dpkg_shlibdeps}" -O ${binaries}
                  WORKING_DIRECTORY "${scratch}"
                  OUTPUT_VARIABLE depends
                  OUTPUT_STRIP_TRAILING_WHITESPACE
                  COMMAND_ERROR_IS_FATAL ANY)
  file(REMOVE_RECURSE "${control}")
  string(REGEX REPLACE "^shlibs:Depends=" "" depends "${depends}")
  string(TOUPPER "${package}" component)
  set(CPACK_DEBIAN_${component}_PACKAGE_DEPENDS "${depends}")
endforeach()
