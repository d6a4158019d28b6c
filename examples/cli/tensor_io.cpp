#include "tensor_io.h"

#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <nlohmann/json.hpp>
#include <optional>
#include <string_view>
#include <system_error>
#include <utility>

#include "failure.h"
#include "sageattn.h"

static_assert(std::endian::native == std::endian::little, "both file formats are little-endian");

namespace sageattn_cli {
namespace {

namespace fs = std::filesystem;

struct TypeTraits {
  ElementType type;
  const char* name;       // in safetensors
  const char* npy_descr;  // NumPy has no bfloat16: ml_dtypes saves it as two raw bytes
  size_t size;
  int32_t dtype;
};

constexpr TypeTraits kTypes[] = {
    {ElementType::kF16, "F16", "<f2", 2, SAGEATTN_F16},
    {ElementType::kBF16, "BF16", "<V2", 2, SAGEATTN_BF16},
    {ElementType::kF32, "F32", "<f4", 4, SAGEATTN_F32},
    {ElementType::kF64, "F64", "<f8", 8, 0},
    {ElementType::kU16, "U16", "<u2", 2, 0},
    {ElementType::kI32, "I32", "<i4", 4, 0},
    {ElementType::kI64, "I64", "<i8", 8, 0},
};

constexpr std::string_view kNpyMagic = "\x93NUMPY";
constexpr size_t kNpyAlignment = 64;  // of the data in the file, as the format asks

const TypeTraits& traits_of(ElementType type) {
  for (const TypeTraits& traits : kTypes) {
    if (traits.type == type) return traits;
  }
  throw std::logic_error("an element type without traits");
}

[[noreturn]] void fail(const std::string& path, const std::string& message) {
  throw Failure(kFileError, path + ": " + message);
}

[[noreturn]] void fail_to_write(const std::string& path, int error) {
  fail(path, std::string("cannot be written: ") + std::strerror(error));
}

// Elements of a shape, nothing if a dimension is negative or the bytes do not fit in an int64.
std::optional<int64_t> checked_count(const std::vector<int64_t>& shape, size_t element_size) {
  int64_t count = 1;
  int64_t bytes;
  for (const int64_t size : shape) {
    if (size < 0 || __builtin_mul_overflow(count, size, &count)) return std::nullopt;
  }
  if (__builtin_mul_overflow(count, static_cast<int64_t>(element_size), &bytes)) {
    return std::nullopt;
  }
  return count;
}

// A file open for reading, all of whose reads are checked.
class Reader {
 public:
  explicit Reader(const std::string& path) : path_(path) {
    std::error_code ignored;
    if (fs::exists(path, ignored) && !fs::is_regular_file(path, ignored)) {
      fail(path, "is not a regular file");
    }
    stream_.open(path, std::ios::binary);
    if (!stream_) fail(path, std::strerror(errno));
    stream_.seekg(0, std::ios::end);
    const std::streamoff end = stream_.tellg();
    stream_.seekg(0);
    if (!stream_ || end < 0) fail(path, "its size cannot be read");
    size_ = static_cast<uint64_t>(end);
  }

  uint64_t size() const { return size_; }
  uint64_t position() { return static_cast<uint64_t>(stream_.tellg()); }
  void seek(uint64_t position) { stream_.seekg(static_cast<std::streamoff>(position)); }

  void read(void* to, uint64_t bytes) {
    stream_.read(static_cast<char*>(to), static_cast<std::streamsize>(bytes));
    if (!stream_) fail(path_, "is truncated");
  }

  std::string read_text(uint64_t bytes) {
    if (bytes > size_) fail(path_, "is truncated");
    std::string text(bytes, '\0');
    read(text.data(), bytes);
    return text;
  }

  template <typename Integer>
  Integer read_integer() {
    Integer value;
    read(&value, sizeof value);
    return value;
  }

 private:
  std::string path_;
  std::ifstream stream_;
  uint64_t size_ = 0;
};

// The header of a .npy file: a Python dictionary of three known keys.
class NpyHeader {
 public:
  NpyHeader(const std::string& path, std::string text) : path_(path), text_(std::move(text)) {}

  ElementType type() const {
    const std::string_view value = after("'descr':");
    const size_t end = value.size() < 2 ? std::string_view::npos : value.find(value[0], 1);
    if (end == std::string_view::npos || (value[0] != '\'' && value[0] != '"')) {
      fail(path_, "structured element types are not supported");
    }
    const std::string_view descr = value.substr(1, end - 1);
    for (const TypeTraits& traits : kTypes) {
      if (descr == traits.npy_descr) return traits.type;
    }
    if (descr == "|V2") return ElementType::kBF16;
    fail(path_, "element type '" + std::string(descr) +
                    "' is not supported: use <f2, <f4, <f8, or <V2 (bfloat16)");
  }

  std::vector<int64_t> shape() const {
    std::string_view value = after("'shape':");
    const size_t end = value.find(')');
    if (value.empty() || value[0] != '(' || end == std::string_view::npos) malformed();
    value = value.substr(1, end - 1);
    std::vector<int64_t> shape;
    while (value.find_first_not_of(" ,") != std::string_view::npos) {
      value.remove_prefix(value.find_first_not_of(" ,"));
      shape.push_back(take_integer(value));
    }
    return shape;
  }

  bool fortran_order() const { return after("'fortran_order':").substr(0, 4) == "True"; }

 private:
  [[noreturn]] void malformed() const { fail(path_, "its .npy header is malformed"); }

  std::string_view after(std::string_view key) const {
    const size_t found = text_.find(key);
    if (found == std::string::npos) malformed();
    std::string_view rest = std::string_view(text_).substr(found + key.size());
    rest.remove_prefix(std::min(rest.find_first_not_of(' '), rest.size()));
    return rest;
  }

  int64_t take_integer(std::string_view& text) const {
    int64_t value = 0;
    size_t used = 0;
    for (; used < text.size() && text[used] >= '0' && text[used] <= '9'; ++used) {
      if (__builtin_mul_overflow(value, 10, &value) ||
          __builtin_add_overflow(value, text[used] - '0', &value)) {
        malformed();
      }
    }
    if (used == 0) malformed();
    text.remove_prefix(used);
    return value;
  }

  const std::string& path_;
  std::string text_;
};

std::string npy_header(const Tensor& tensor) {
  std::string shape = "(";
  for (const int64_t size : tensor.shape) shape += std::to_string(size) + ", ";
  shape += ")";
  std::string dictionary = std::string("{'descr': '") + traits_of(tensor.type).npy_descr +
                           "', 'fortran_order': False, 'shape': " + shape + ", }";
  const size_t fixed = kNpyMagic.size() + 4;  // the magic, two version bytes, a 16-bit length
  const size_t used = fixed + dictionary.size() + 1;
  dictionary.append((kNpyAlignment - used % kNpyAlignment) % kNpyAlignment, ' ');
  dictionary += '\n';
  const auto length = static_cast<uint16_t>(dictionary.size());
  std::string header(kNpyMagic);
  header += {'\x01', '\x00', static_cast<char>(length & 0xff), static_cast<char>(length >> 8)};
  return header + dictionary;
}

Tensor f32_from_f64(const Tensor& from) {
  Tensor to = make_tensor(ElementType::kF32, from.shape);
  const auto* source = reinterpret_cast<const double*>(from.data.data());
  auto* target = reinterpret_cast<float*>(to.data.data());
  for (int64_t i = 0; i < from.count(); ++i) target[i] = static_cast<float>(source[i]);
  return to;
}

Tensor read_safetensors(const std::string& path, std::string name) {
  const SafetensorsFile file(path);
  if (name.empty() && file.names().size() == 1) name = file.names().front();
  if (!file.contains(name)) {
    std::string known;
    for (const std::string& candidate : file.names()) known += " " + candidate;
    fail(path, (name.empty() ? "name a tensor as FILE.safetensors:NAME"
                             : "holds no tensor '" + name + "'") +
                   "; it holds:" + known);
  }
  return file.read(name);
}

Tensor read_tensor(const std::string& source) {
  constexpr std::string_view kSuffix = ".safetensors";
  const size_t separator = source.rfind(std::string(kSuffix) + ":");
  if (separator != std::string::npos) {
    const size_t path_size = separator + kSuffix.size();
    return read_safetensors(source.substr(0, path_size), source.substr(path_size + 1));
  }
  return source.ends_with(kSuffix) ? read_safetensors(source, "") : read_npy(source);
}

void write_pieces(const std::string& path, const std::string& header,
                  const std::vector<std::byte>& data) {
  std::ofstream stream(path, std::ios::binary | std::ios::trunc);
  if (!stream) fail_to_write(path, errno);
  stream.write(header.data(), static_cast<std::streamsize>(header.size()));
  stream.write(reinterpret_cast<const char*>(data.data()),
               static_cast<std::streamsize>(data.size()));
  stream.close();
  if (stream) return;
  const int error = errno;
  remove_file(path);
  fail_to_write(path, error);
}

}  // namespace

size_t size_of(ElementType type) { return traits_of(type).size; }
const char* name_of(ElementType type) { return traits_of(type).name; }
int32_t dtype_of(ElementType type) { return traits_of(type).dtype; }

ElementType type_of_dtype(int32_t dtype) {
  for (const TypeTraits& traits : kTypes) {
    if (dtype != 0 && traits.dtype == dtype) return traits.type;
  }
  throw std::logic_error("not a dtype");
}

int64_t Tensor::count() const { return static_cast<int64_t>(data.size() / size_of(type)); }

Tensor make_tensor(ElementType type, std::vector<int64_t> shape) {
  const std::optional<int64_t> count = checked_count(shape, size_of(type));
  if (!count) throw std::bad_alloc();
  return {type, std::move(shape), std::vector<std::byte>(*count * size_of(type))};
}

std::string to_string(const std::vector<int64_t>& shape) {
  std::string text;
  for (const int64_t size : shape) text += (text.empty() ? "" : ", ") + std::to_string(size);
  return "[" + text + "]";
}

Tensor read_npy(const std::string& path) {
  Reader reader(path);
  if (reader.size() < kNpyMagic.size() || reader.read_text(kNpyMagic.size()) != kNpyMagic) {
    fail(path, "is not a .npy file");
  }
  const auto version = reader.read_integer<uint16_t>() & 0xff;  // low byte: major
  if (version < 1 || version > 3) fail(path, ".npy version " + std::to_string(version));
  const uint64_t length =
      version == 1 ? reader.read_integer<uint16_t>() : reader.read_integer<uint32_t>();
  const NpyHeader header(path, reader.read_text(length));
  if (header.fortran_order()) fail(path, "is in Fortran order; save np.ascontiguousarray(x)");

  const ElementType type = header.type();
  std::vector<int64_t> shape = header.shape();
  const std::optional<int64_t> count = checked_count(shape, size_of(type));
  const uint64_t available = reader.size() - reader.position();
  if (!count || static_cast<uint64_t>(*count) * size_of(type) != available) {
    fail(path, "its shape " + to_string(shape) + " does not fit its " + std::to_string(available) +
                   " bytes of data");
  }
  Tensor tensor = make_tensor(type, std::move(shape));
  reader.read(tensor.data.data(), tensor.data.size());
  return tensor;
}

void write_npy(const std::string& path, const Tensor& tensor) {
  write_pieces(path, npy_header(tensor), tensor.data);
}

void write_file(const std::string& path, const std::vector<std::byte>& bytes) {
  write_pieces(path, "", bytes);
}

void make_folder(const std::string& path) {
  std::error_code error;
  fs::create_directories(path, error);
  if (error) fail(path, "cannot be made: " + error.message());
}

void check_writable(const std::string& path) {
  std::error_code ignored;
  if (fs::is_directory(path, ignored)) fail_to_write(path, EISDIR);
  if (access(path.c_str(), W_OK) == 0) return;
  const fs::path folder = fs::path(path).parent_path() / ".";  // "." for a bare name
  if (errno == ENOENT && access(folder.c_str(), W_OK | X_OK) == 0) return;
  fail_to_write(path, errno);
}

void remove_file(const std::string& path) {
  std::error_code ignored;
  if (fs::is_regular_file(fs::symlink_status(path, ignored))) fs::remove(path, ignored);
}

SafetensorsFile::SafetensorsFile(const std::string& path) : path_(path) {
  Reader reader(path);
  if (reader.size() < sizeof(uint64_t)) fail(path, "is not a .safetensors file");
  const auto length = reader.read_integer<uint64_t>();
  if (length > reader.size() - sizeof(uint64_t)) fail(path, "its .safetensors header is truncated");
  const auto header = nlohmann::json::parse(reader.read_text(length), nullptr, false);
  const uint64_t data_begin = sizeof(uint64_t) + length;
  try {
    for (const auto& [name, value] : header.items()) {
      if (name == "__metadata__") {
        value.get_to(metadata_);
        continue;
      }
      Entry entry{};
      value.at("dtype").get_to(entry.type_name);
      value.at("shape").get_to(entry.shape);
      entry.begin = data_begin + value.at("data_offsets").at(0).get<uint64_t>();
      entry.end = data_begin + value.at("data_offsets").at(1).get<uint64_t>();
      if (entry.begin < data_begin || entry.end < entry.begin || entry.end > reader.size()) {
        fail(path, "tensor '" + name + "' lies outside the file");
      }
      for (const TypeTraits& traits : kTypes) {
        if (entry.type_name != traits.name) continue;
        entry.type = traits.type;
        entry.supported = true;
      }
      entries_.emplace(name, std::move(entry));
    }
  } catch (const nlohmann::json::exception&) {
    fail(path, "its .safetensors header is malformed");
  }
}

std::vector<std::string> SafetensorsFile::names() const {
  std::vector<std::string> names;
  for (const auto& [name, entry] : entries_) names.push_back(name);
  return names;
}

Tensor SafetensorsFile::read(const std::string& name) const {
  const Entry& entry = entries_.at(name);
  if (!entry.supported) {
    fail(path_, "tensor '" + name + "' has the unsupported type " + entry.type_name);
  }
  const std::optional<int64_t> count = checked_count(entry.shape, size_of(entry.type));
  if (!count || *count * size_of(entry.type) != entry.end - entry.begin) {
    fail(path_, "tensor '" + name + "': its shape " + to_string(entry.shape) + " does not fit " +
                    std::to_string(entry.end - entry.begin) + " bytes of data");
  }
  Tensor tensor = make_tensor(entry.type, entry.shape);
  Reader reader(path_);
  reader.seek(entry.begin);
  reader.read(tensor.data.data(), tensor.data.size());
  return tensor;
}

Tensor read_operand(const std::string& source, bool u16_is_bf16) {
  Tensor tensor = read_tensor(source);
  if (tensor.type == ElementType::kF64) {
    std::cerr << "sageattn: note: " << source << ": float64 is read as float32\n";
    return f32_from_f64(tensor);
  }
  if (tensor.type == ElementType::kU16 && u16_is_bf16) tensor.type = ElementType::kBF16;
  if (tensor.type == ElementType::kU16)
    fail(source, "holds uint16; give --bf16 if that is bfloat16");
  if (dtype_of(tensor.type) == 0) {
    fail(source, std::string("holds ") + name_of(tensor.type) + "; F16, BF16 or F32 is needed");
  }
  return tensor;
}

std::vector<int32_t> read_int32(const std::string& source) {
  const Tensor tensor = read_tensor(source);
  if (tensor.shape.size() != 1) {
    fail(source, "has shape " + to_string(tensor.shape) + "; one dimension is needed");
  }
  if (tensor.type != ElementType::kI32 && tensor.type != ElementType::kI64) {
    fail(source, std::string("holds ") + name_of(tensor.type) + "; I32 is needed");
  }
  const auto* narrow = reinterpret_cast<const int32_t*>(tensor.data.data());
  const auto* wide = reinterpret_cast<const int64_t*>(tensor.data.data());
  std::vector<int32_t> values(tensor.count());
  for (size_t i = 0; i < values.size(); ++i) {
    const int64_t value = tensor.type == ElementType::kI32 ? narrow[i] : wide[i];
    if (!std::in_range<int32_t>(value)) {
      fail(source, std::to_string(value) + " does not fit in 32 bits");
    }
    values[i] = static_cast<int32_t>(value);
  }
  return values;
}

}  // namespace sageattn_cli
