// The bytes a strided tensor occupies, and two questions about them. Both are answered "yes" only
// when it is certain; the layouts for which that is so are stated in sageattn.h at
// SAGEATTN_E_ALIASED.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <utility>

namespace sageattn {

__extension__ typedef __int128 int128;

struct Region {
  struct Dimension {
    int64_t size;
    int128 stride;  // bytes, not negative
  };

  const char* name = nullptr;
  int128 begin = 0;                       // lowest address
  int128 element = 0;                     // bytes an element; 0: the region is empty
  std::array<Dimension, 4> dimensions{};  // those of size 1 are {1, 0}

  bool empty() const { return element == 0; }

  // Bytes from the first to behind the last.
  int128 span() const {
    int128 bytes = element;
    for (const Dimension& d : dimensions) bytes += (d.size - 1) * d.stride;
    return bytes;
  }
};

// Sizes and strides count elements. A negative stride walks down from `data`; the region is the
// same as that of its mirror image.
inline Region strided_region(const char* name, const void* data, size_t element,
                             const std::array<std::pair<int64_t, int64_t>, 4>& sizes_strides) {
  Region region;
  region.name = name;
  region.begin = static_cast<int128>(reinterpret_cast<uintptr_t>(data));
  for (size_t i = 0; i < 4; ++i) {
    const auto [size, stride] = sizes_strides[i];
    if (size == 0) return Region{};
    const int128 bytes = static_cast<int128>(stride) * static_cast<int128>(element);
    if (bytes < 0) region.begin += (size - 1) * bytes;
    region.dimensions[i] =
        size == 1 ? Region::Dimension{1, 0} : Region::Dimension{size, bytes < 0 ? -bytes : bytes};
  }
  region.element = static_cast<int128>(element);
  return region;
}

inline Region array_region(const char* name, const void* data, size_t element, int64_t count) {
  return strided_region(name, data, element, {{{count, 1}, {1, 0}, {1, 0}, {1, 0}}});
}

// Whether no two elements share a byte: each dimension steps over all that the dimensions with
// smaller strides span.
inline bool elements_distinct(const Region& region) {
  auto dimensions = region.dimensions;
  std::sort(dimensions.begin(), dimensions.end(),
            [](const auto& a, const auto& b) { return a.stride < b.stride; });
  int128 span = region.element;
  for (const Region::Dimension& d : dimensions) {
    if (d.size == 1) continue;
    if (d.stride < span) return false;
    span += (d.size - 1) * d.stride;
  }
  return true;
}

// Whether no byte belongs to both: their address ranges are apart, or apart modulo a stride of
// either. The latter is what slices of the rows of one buffer are: q, k, v and out as columns of a
// [tokens, 4 * heads * channels] array interleave, but not modulo its row.
inline bool regions_disjoint(const Region& a, const Region& b) {
  if (a.empty() || b.empty()) return true;
  if (a.begin + a.span() <= b.begin || b.begin + b.span() <= a.begin) return true;

  // Bytes that a region spans modulo `period`: a dimension that steps by a multiple stays put.
  const auto residual_span = [](const Region& region, int128 period) {
    int128 bytes = region.element;
    for (const Region::Dimension& d : region.dimensions) {
      if (d.stride % period != 0) bytes += (d.size - 1) * d.stride;
    }
    return bytes;
  };
  for (const Region* region : {&a, &b}) {
    for (const Region::Dimension& d : region->dimensions) {
      const int128 period = d.stride;
      if (period == 0) continue;
      const int128 from_a_to_b = ((b.begin - a.begin) % period + period) % period;
      if (from_a_to_b >= residual_span(a, period) &&
          period - from_a_to_b >= residual_span(b, period)) {
        return true;
      }
    }
  }
  return false;
}

}  // namespace sageattn
