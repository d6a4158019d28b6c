#include "tests/gpu/setup.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>

#include "src/core/error.h"
#include "src/cpu/formats.h"

namespace sageattn_test {

namespace {

ContextOwner open_context(int ordinal) {
  sageattn_context_desc desc = {};
  desc.struct_size = sizeof desc;
  desc.backend = SAGEATTN_BACKEND_CUDA;
  desc.device = ordinal;
  sageattn_error error = {};
  error.struct_size = sizeof error;
  sageattn_context* context = nullptr;
  const int32_t status = sageattn_context_create(&desc, &context, &error);
  if (status == SAGEATTN_E_NO_DEVICE || status == SAGEATTN_E_DRIVER_TOO_OLD) {
    throw Skipped(error.message);
  }
  must(status, error);
  return ContextOwner(context);
}

}  // namespace

bool Flags::take(const std::string& name) {
  const auto found = std::find(words_.begin(), words_.end(), name);
  if (found == words_.end()) return false;
  words_.erase(found);
  return true;
}

std::vector<std::string> Flags::values(const std::string& name) {
  std::vector<std::string> list;
  for (;;) {
    const auto found = std::find(words_.begin(), words_.end(), name);
    if (found == words_.end()) return list;
    if (found + 1 == words_.end()) throw std::runtime_error(name + ": a value is missing");
    list.push_back(found[1]);
    words_.erase(found, found + 2);
  }
}

std::string Flags::value(const std::string& name, const std::string& otherwise) {
  const std::vector<std::string> list = values(name);
  return list.empty() ? otherwise : list.back();
}

int Flags::number(const std::string& name, int otherwise) {
  const std::string text = value(name, "");
  return text.empty() ? otherwise : std::atoi(text.c_str());
}

void Flags::finish() const {
  if (!words_.empty()) throw std::runtime_error("unknown flag: " + words_.front());
}

void must(int32_t status, const sageattn_error& error) {
  if (status != SAGEATTN_OK) throw std::runtime_error(error.message);
}

Gpu::Gpu(int ordinal)
    : context_(open_context(ordinal)), api(cuda::driver()), device(cuda::open_device(ordinal)) {}

int guarded_main(int argc, char** argv, int (*run)(Flags& flags)) {
  try {
    Flags flags(argc, argv);
    return run(flags);
  } catch (const Skipped& skipped) {
    std::printf("skipped: %s\n", skipped.what());
    return 77;
  } catch (const sageattn::Error& error) {
    std::fprintf(stderr, "%s\n", error.message);
  } catch (const std::exception& exception) {
    std::fprintf(stderr, "%s\n", exception.what());
  }
  return 2;
}

Noise::Noise(int32_t dtype) {
  uint64_t state = 1;
  for (int64_t i = 0; i < kPeriod; ++i) {
    state = state * 6364136223846793005u + 1442695040888963407u;
    double sum = -2;  // of four uniform numbers, of mean 0.5
    for (int j = 0; j < 4; ++j) {
      sum += (static_cast<double>(state >> (16 + 12 * j) & 0xfff) + 0.5) / 4096;
    }
    const auto x = static_cast<float>(sum * std::sqrt(3.0));
    const bool bf16 = dtype == SAGEATTN_BF16;
    bits_.push_back(bf16 ? sageattn::float_to_bf16(x) : sageattn::float_to_f16(x));
    values_.push_back(bf16 ? sageattn::bf16_to_float(bits_.back())
                           : sageattn::f16_to_float(bits_.back()));
  }
  for (size_t i = 0; i < 256; ++i) {
    bits_.push_back(bits_[i]);
    values_.push_back(values_[i]);
  }
}

void Noise::fill(cuda::DeviceMemory& memory, int64_t first) const {
  // Some periods at a time: a copy costs microseconds, whatever its size.
  const auto count = static_cast<int64_t>(memory.size() / 2);
  const int64_t piece = std::min(16 * kPeriod, count);
  std::vector<uint16_t> content(static_cast<size_t>(piece));
  for (int64_t i = 0; i < piece; ++i) content[static_cast<size_t>(i)] = *bits(first + i);
  for (int64_t start = 0; start < count; start += piece) {
    memory.upload(content.data(), static_cast<size_t>(std::min(piece, count - start) * 2),
                  static_cast<size_t>(start * 2));
  }
}

}  // namespace sageattn_test
