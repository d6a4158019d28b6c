# cmake -DROOT=<repository> -DOUTPUT=<file> -P source_id.cmake
#
# Writes the C++ file that defines kSourceId: the SHA-256 of one line "<path> <SHA-256>" for each
# file of include/, src/ and ptx/, in the order of the paths' bytes.
cmake_minimum_required(VERSION 3.25)

file(GLOB_RECURSE paths RELATIVE "${ROOT}" "${ROOT}/include/*" "${ROOT}/src/*" "${ROOT}/ptx/*")
list(FILTER paths EXCLUDE REGEX "(^|/)\\.|~$") # what editors leave behind
list(SORT paths COMPARE STRING)
set(text "")
foreach(path IN LISTS paths)
  file(SHA256 "${ROOT}/${path}" digest)
  string(APPEND text "${path} ${digest}\n")
endforeach()
string(SHA256 source_id "${text}")
file(WRITE "${OUTPUT}" "namespace sageattn {
extern const char kSourceId[];
const char kSourceId[] = \"${source_id}\";
}  // namespace sageattn
")
