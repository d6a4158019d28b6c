// Reads a safetensors file: 8 bytes of header length, a JSON header, then the tensors' bytes.
#pragma once

#include <cstdint>
#include <cstring>
#include <fstream>
#include <iterator>
#include <map>
#include <nlohmann/json.hpp>
#include <stdexcept>
#include <string>
#include <vector>

namespace sageattn_test {

class Safetensors {
 public:
  struct Tensor {
    std::string dtype;  // as in the file: "F16", "BF16", "F32", "F64", "I32", ...
    std::vector<int64_t> shape;
    const unsigned char* data;  // aligned to its element if the file's writer saw to it
    size_t bytes;

    int64_t elements() const {
      int64_t n = 1;
      for (const int64_t size : shape) n *= size;
      return n;
    }
  };

  explicit Safetensors(const std::string& path) {
    std::ifstream file(path, std::ios::binary);
    if (!file) throw std::runtime_error("cannot open " + path);
    bytes_.assign(std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>());
    if (bytes_.size() < 8) throw std::runtime_error(path + ": too short");
    uint64_t length = 0;
    for (int i = 7; i >= 0; --i) length = length << 8 | bytes_[static_cast<size_t>(i)];
    if (length > bytes_.size() - 8) throw std::runtime_error(path + ": header too long");
    const auto header = nlohmann::json::parse(bytes_.begin() + 8,
                                              bytes_.begin() + 8 + static_cast<int64_t>(length));
    const size_t start = 8 + static_cast<size_t>(length);
    for (const auto& [name, value] : header.items()) {
      if (name == "__metadata__") {
        metadata_ = value.get<std::map<std::string, std::string>>();
        continue;
      }
      const auto begin = value.at("data_offsets").at(0).get<size_t>();
      const auto end = value.at("data_offsets").at(1).get<size_t>();
      Tensor tensor{value.at("dtype").get<std::string>(),
                    value.at("shape").get<std::vector<int64_t>>(), bytes_.data() + start + begin,
                    end - begin};
      if (begin > end || end > bytes_.size() - start ||
          tensor.bytes != static_cast<size_t>(tensor.elements()) * element_size(tensor.dtype)) {
        throw std::runtime_error(path + ": bad extent of " + name);
      }
      tensors_.emplace(name, std::move(tensor));
    }
  }
  // Tensors point into the file's bytes.
  Safetensors(const Safetensors&) = delete;
  Safetensors& operator=(const Safetensors&) = delete;

  const std::map<std::string, std::string>& metadata() const { return metadata_; }
  const std::map<std::string, Tensor>& tensors() const { return tensors_; }

  const Tensor* find(const std::string& name) const {
    const auto at = tensors_.find(name);
    return at == tensors_.end() ? nullptr : &at->second;
  }
  const Tensor& at(const std::string& name) const { return tensors_.at(name); }

  static size_t element_size(const std::string& dtype) {
    if (dtype == "F64") return 8;
    if (dtype == "F32" || dtype == "I32") return 4;
    if (dtype == "F16" || dtype == "BF16") return 2;
    throw std::runtime_error("unknown dtype " + dtype);
  }

 private:
  std::vector<unsigned char> bytes_;
  std::map<std::string, std::string> metadata_;
  std::map<std::string, Tensor> tensors_;
};

}  // namespace sageattn_test
