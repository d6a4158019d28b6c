// The memory of one execute: tensors placed as a View says, in images of bytes that either backend
// can be given (a copy of). Gaps and ends hold NaN around inputs and canaries around outputs.
#pragma once

#include <cstdint>
#include <vector>

#include "sageattn.h"
#include "tests/grid.h"

namespace sageattn_test {

// What outputs hold before a run: in every dtype a NaN with a payload that nothing computes.
inline constexpr unsigned char kCanary = 0xFF;
// What lies around a workspace.
inline constexpr unsigned char kWorkspaceCanary = 0xA5;

struct Dims {
  int64_t batch, token, head, dim;
};

class Tensor {
 public:
  Tensor(View view, int32_t layout, int32_t dtype, const Dims& dims);

  void fill_nan();
  // Offset in the image of an element.
  size_t at(int64_t b, int64_t t, int64_t h, int64_t c) const;
  // What is passed as data, of a copy of the image; null for a tensor without elements.
  unsigned char* data(unsigned char* copy) const;
  // What is passed as strides: zeros for the default, nonsense where it must be ignored.
  Dims strides(bool varlen) const;

  int32_t dtype() const { return dtype_; }
  const Dims& dims() const { return dims_; }

  std::vector<unsigned char> image;

 private:
  View view_;
  int32_t dtype_;
  Dims dims_, stride_;
  int64_t origin_;
  bool empty_;
};

struct Buffers {
  Tensor q, k, v, out, lse;
  std::vector<int32_t> cu_q, cu_kv, used;
  std::vector<int32_t> status;  // with a guard on either side
};

Buffers make_buffers(const Problem& problem, const Data& data, const Lengths& instead = {});
bool status_guards_hold(const std::vector<int32_t>& status);

// Where the images and arrays are, or their copies.
struct Addresses {
  unsigned char *q, *k, *v, *out, *lse;
  int32_t *cu_q, *cu_kv, *used, *status;
};
Addresses addresses_of(Buffers& buffers);

sageattn_execute_args make_args(const Problem& problem, const Buffers& buffers,
                                const Addresses& at);

}  // namespace sageattn_test
