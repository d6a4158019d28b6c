// Tensors in host memory, and the two file formats they come in: .npy and .safetensors.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

namespace sageattn_cli {

enum class ElementType { kF16, kBF16, kF32, kF64, kU16, kI32, kI64 };

size_t size_of(ElementType type);
const char* name_of(ElementType type);  // as safetensors writes it: "F16"

// The SAGEATTN_F16, _BF16 or _F32 of a type; 0 if the library does not take it.
int32_t dtype_of(ElementType type);
ElementType type_of_dtype(int32_t dtype);

// Dense, the last dimension adjacent.
struct Tensor {
  ElementType type = ElementType::kF32;
  std::vector<int64_t> shape;
  std::vector<std::byte> data;

  int64_t count() const;
};

// Zeros.
Tensor make_tensor(ElementType type, std::vector<int64_t> shape);

// "[1, 64, 8, 128]"
std::string to_string(const std::vector<int64_t>& shape);

// All functions below throw Failure(kFileError), whose message names the file.

Tensor read_npy(const std::string& path);

// Leaves no regular file behind if it fails.
void write_npy(const std::string& path, const Tensor& tensor);

void write_file(const std::string& path, const std::vector<std::byte>& bytes);  // likewise

// With those above it; does nothing if it is there.
void make_folder(const std::string& path);

// Throws if these could not open the file; touches nothing.
void check_writable(const std::string& path);

// Removes a regular file, and nothing else: a device stays. Does not throw.
void remove_file(const std::string& path);

class SafetensorsFile {
 public:
  explicit SafetensorsFile(const std::string& path);

  const std::map<std::string, std::string>& metadata() const { return metadata_; }
  std::vector<std::string> names() const;
  bool contains(const std::string& name) const { return entries_.count(name) != 0; }
  Tensor read(const std::string& name) const;

 private:
  struct Entry {
    ElementType type;
    bool supported;         // false: `type` means nothing
    std::string type_name;  // as the file has it
    std::vector<int64_t> shape;
    uint64_t begin, end;  // in the file
  };

  std::string path_;
  std::map<std::string, std::string> metadata_;
  std::map<std::string, Entry> entries_;
};

// Reads "file.npy" or "file.safetensors:name" (the name may be left out if the file holds a single
// tensor) as F16, BF16 or F32. F64 becomes F32, with a note on stderr; U16 is taken as the bits of
// BF16 if `u16_is_bf16`, else refused.
Tensor read_operand(const std::string& source, bool u16_is_bf16);

// Reads a one-dimensional I32 or I64 tensor from the same sources.
std::vector<int32_t> read_int32(const std::string& source);

}  // namespace sageattn_cli
