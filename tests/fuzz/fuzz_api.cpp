// Feeds the public API with calls decoded from bytes, and checks what holds for every call:
// failures leave outputs alone and say why; successes write exactly the elements they own, the same
// bits with one thread and with three, and never the inputs.
//
// Every value is either one that makes sense (most of the time) or arbitrary. Buffers span exactly
// the elements that their tensor has, so AddressSanitizer, or without it a border of known bytes,
// finds accesses beside them.
#include <sageattn.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>
#include <vector>

namespace {

#if defined(__SANITIZE_ADDRESS__)
#define FUZZ_ASAN 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
#define FUZZ_ASAN 1
#endif
#endif
#ifdef FUZZ_ASAN
constexpr size_t kBorder = 0;  // the allocator has its own
#else
constexpr size_t kBorder = 256;
#endif
constexpr unsigned char kBorderByte = 0xC3;

constexpr int64_t kMaxElements = int64_t{1} << 17;  // of a tensor that is really allocated
constexpr int64_t kMaxProducts = int64_t{1} << 23;  // multiplications of one execute
constexpr int64_t kMaxWorkspace = int64_t{1} << 26;

#define EXPECT(condition)                                                                 \
  do {                                                                                    \
    if (!(condition)) {                                                                   \
      std::fprintf(stderr, "%s:%d: does not hold: %s\n", __FILE__, __LINE__, #condition); \
      std::abort();                                                                       \
    }                                                                                     \
  } while (0)

// The input, read from its front; zeros once it is used up.
class Bytes {
 public:
  Bytes(const uint8_t* data, size_t size) : data_(data), size_(size) {}

  uint8_t byte() {
    if (size_ == 0) return 0;
    --size_;
    return *data_++;
  }
  int below(int limit) { return byte() % limit; }
  bool rarely() { return byte() >= 0xE8; }

  template <typename T>
  T raw() {
    std::array<uint8_t, sizeof(T)> bytes;
    for (uint8_t& b : bytes) b = byte();
    T value;
    std::memcpy(&value, bytes.data(), sizeof(T));
    return value;
  }

  template <typename T>
  T of(std::initializer_list<T> values) {
    return values.begin()[below(static_cast<int>(values.size()))];
  }

 private:
  const uint8_t* data_;
  size_t size_;
};

// Memory between two borders that must stay as they are.
class Guarded {
 public:
  Guarded(size_t size, size_t alignment, size_t offset = 0)
      : size_(size), alignment_(alignment), lead_(round_up(kBorder, alignment) + offset) {
    memory_ = static_cast<unsigned char*>(
        ::operator new (lead_ + size + kBorder, std::align_val_t{alignment}));
    std::memset(memory_, kBorderByte, lead_ + size + kBorder);
  }
  ~Guarded() { ::operator delete (memory_, std::align_val_t{alignment_}); }
  Guarded(const Guarded&) = delete;
  Guarded& operator=(const Guarded&) = delete;

  unsigned char* data() { return memory_ + lead_; }
  size_t size() const { return size_; }
  void fill(int value) {
    if (size_ != 0) std::memset(data(), value, size_);
  }
  void check() const {
    const auto intact = [](unsigned char b) { return b == kBorderByte; };
    EXPECT(std::all_of(memory_, memory_ + lead_, intact));
    EXPECT(std::all_of(memory_ + lead_ + size_, memory_ + lead_ + size_ + kBorder, intact));
  }

 private:
  static size_t round_up(size_t a, size_t b) { return (a + b - 1) / b * b; }

  size_t size_;
  size_t alignment_;
  size_t lead_;
  unsigned char* memory_;
};

// A caller's struct of any struct_size, with some bytes beyond the struct that this file knows.
template <typename T>
struct Sized {
  alignas(T) std::array<unsigned char, sizeof(T) + 64> bytes{};

  T* get() { return reinterpret_cast<T*>(bytes.data()); }

  // Mostly leaves the size right. Else shorter, or longer with a zero or a non-zero tail. Structs
  // with pointers want a step that cuts none of them in two.
  void vary_size(Bytes& in, size_t step) {
    get()->struct_size = sizeof(T);
    if (!in.rarely()) return;
    const size_t size = in.raw<uint16_t>() % (bytes.size() + 1) / step * step;
    get()->struct_size = static_cast<uint32_t>(size);
    if (size > sizeof(T) && in.below(2) == 1) bytes[size - 1] = in.byte();
  }

  // What the library is to see: zeros for what is missing.
  T seen() const {
    T value{};
    uint32_t size;
    std::memcpy(&size, bytes.data(), sizeof size);
    std::memcpy(&value, bytes.data(), std::min<size_t>(size, sizeof(T)));
    return value;
  }
  bool has_tail() const {
    uint32_t size;
    std::memcpy(&size, bytes.data(), sizeof size);
    for (size_t i = sizeof(T); i < size; ++i) {
      if (bytes[i] != 0) return true;
    }
    return false;
  }
};

// The error struct of one call, in a few sizes or absent.
class Error {
 public:
  explicit Error(Bytes& in) {
    std::memset(bytes_.data(), 0x5A, bytes_.size());
    const uint32_t size = in.rarely() ? in.raw<uint16_t>() % (sizeof(sageattn_error) + 1)
                                      : static_cast<uint32_t>(sizeof(sageattn_error));
    present_ = size != sizeof(sageattn_error) ? in.below(2) == 0 : true;
    size_ = size < sizeof size ? 0 : size;  // there is no room for a size of 1 to 3
    std::memcpy(bytes_.data(), &size_, sizeof size_);
  }

  sageattn_error* get() {
    return present_ ? reinterpret_cast<sageattn_error*>(bytes_.data()) : nullptr;
  }

  // What the struct must hold after a call that returned `status`.
  void check(int32_t status) const {
    EXPECT(std::strcmp(sageattn_status_name(status), "unknown status") != 0);
    EXPECT(status != SAGEATTN_E_INTERNAL);
    uint32_t size;
    std::memcpy(&size, bytes_.data(), sizeof size);
    EXPECT(size == size_);
    const size_t known = present_ ? std::max<size_t>(size_, sizeof size) : sizeof size;
    for (size_t i = known; i < bytes_.size(); ++i) EXPECT(bytes_[i] == 0x5A);
    constexpr size_t kStatus = offsetof(sageattn_error, status);
    constexpr size_t kMessage = offsetof(sageattn_error, message);
    if (!present_ || size_ < kMessage) return;
    int32_t stored;
    std::memcpy(&stored, bytes_.data() + kStatus, sizeof stored);
    EXPECT(stored == status);
    if (size_ == kMessage) return;
    const void* end = std::memchr(bytes_.data() + kMessage, 0, size_ - kMessage);
    EXPECT(end != nullptr);
    if (size_ > kMessage + 1) EXPECT((bytes_[kMessage] == 0) == (status == SAGEATTN_OK));
  }

 private:
  alignas(sageattn_error) std::array<unsigned char, sizeof(sageattn_error) + 16> bytes_;
  uint32_t size_;
  bool present_;
};

// Contexts for every arch, with one thread and with three; they live as long as the process.
class Contexts {
 public:
  ~Contexts() {
    for (auto& pair : contexts_) {
      for (sageattn_context* context : pair) sageattn_context_destroy(context);
    }
  }
  sageattn_context* get(int arch, int many_threads) {
    static constexpr std::array<int32_t, 6> kArchs = {0, 80, 86, 89, 90, 120};
    sageattn_context*& context = contexts_[arch % 6][many_threads];
    if (context == nullptr) {
      sageattn_context_desc desc{};
      desc.struct_size = sizeof desc;
      desc.backend = SAGEATTN_BACKEND_CPU;
      desc.target_arch = kArchs[arch % 6];
      desc.num_threads = many_threads != 0 ? 3 : 1;
      EXPECT(sageattn_context_create(&desc, &context, nullptr) == SAGEATTN_OK);
    }
    return context;
  }

 private:
  std::array<std::array<sageattn_context*, 2>, 6> contexts_{};
};
Contexts g_contexts;

// ---- Fields ------------------------------------------------------------------------------------

struct Field {
  enum Type { kI32, kI64, kF32 };
  size_t offset;
  Type type;
  std::vector<double> values;  // some that make sense or lie on a border
};

#define I32(member, ...)                                   \
  {                                                        \
    offsetof(Struct, member), Field::kI32, { __VA_ARGS__ } \
  }
#define I64(member, ...)                                   \
  {                                                        \
    offsetof(Struct, member), Field::kI64, { __VA_ARGS__ } \
  }
#define F32(member, ...)                                   \
  {                                                        \
    offsetof(Struct, member), Field::kF32, { __VA_ARGS__ } \
  }

constexpr double kBig = 1 << 30;

const std::vector<Field>& attn_fields() {
  using Struct = sageattn_attn_desc;
  static const std::vector<Field> fields = {
      I32(q_dtype, 0, 1, 2, 3, 4),
      I32(kv_dtype, 0, 1, 2, 3, 4),
      I32(out_dtype, 0, 1, 2, 3, 4),
      I32(layout, 0, 1, 2),
      I32(batch_mode, 0, 1, 2),
      I32(mask, 0, 1, 2, 3, 4),
      I32(window_left, -2, -1, 0, 1, 5, 31, 100, kBig),
      I32(window_right, -2, -1, 0, 1, 5, 31, 100, kBig),
      I32(head_dim, 0, 1, 2, 31, 32, 64, 96, 128, 255, 256, 257),
      I32(head_dim_v, 0, 1, 2, 31, 32, 64, 96, 128, 255, 256, 257),
      I32(num_qo_heads, 0, 1, 2, 3, 4, 6, 65536, 65537),
      I32(num_kv_heads, 0, 1, 2, 3, 4, 6, 65536, 65537),
      I32(sm_scale_set, 0, 1, 2),
      F32(sm_scale, 0, 0.125, -0.5, 1, 1e30, 1e-30, -1e38),
      I32(max_batch, 0, 1, 2, 5, 1 << 24, (1 << 24) + 1),
      I32(max_qo_len, 0, 1, 7, 64, 129, kBig, kBig + 1),
      I32(max_kv_len, 0, 1, 7, 64, 129, kBig, kBig + 1),
      I64(max_total_qo, 0, 1, 10, 100, -1, kBig, 1e18),
      I64(max_total_kv, 0, 1, 10, 100, -1, kBig, 1e18),
      I32(qk_format, 0, 1, 2, 3, 4, 5),
      I32(qk_granularity, 0, 1, 2, 3, 4, 5, 6),
      I32(smooth_q, 0, 1, 2, 3),
      I32(smooth_k, 0, 1, 2, 3),
      I32(smooth_v, 0, 1, 2, 3, 4),
      I32(v_scale, 0, 1, 2, 3),
      I32(rotation, 0, 1, 2, 3),
      I32(pv_format, 0, 1, 2, 3, 4, 5, 6),
      I32(row_sum, 0, 1, 2, 3),
      I32(pv_accum, 0, 1, 2, 3, 4, 5),
      I32(promotion_interval, 0, 32, 64, 96, 128, 256, 16, -32, kBig),
      I32(kernel, 0, 1, 2, 3),
      I32(pv_model, 0, 1, 2, 3),
      I32(bias, 0, 1),
      I32(num_sinks, 0, 1),
      I32(kv_storage, 0, 1),
      F32(softcap, 0, 1),
      I32(reserved, 0, 1),
  };
  return fields;
}

const std::vector<Field>& args_fields() {
  using Struct = sageattn_execute_args;
  static const std::vector<Field> fields = {
      I32(batch, -1, 0, 1, 2, 3, kBig),     I32(qo_len, -1, 0, 1, 7, 64, kBig),
      I32(kv_len, -1, 0, 1, 7, 64, kBig),   I64(total_qo, -1, 0, 1, 7, 64, 1e18),
      I64(total_kv, -1, 0, 1, 7, 64, 1e18), I64(q.stride_batch, 0, 1, -1),
      I64(q.stride_token, 0, 1, -1),        I64(q.stride_head, 0, 1, -1),
      I64(q.stride_dim, 0, 1, 2, -1),       I64(k.stride_token, 0, 1, -1),
      I64(k.stride_head, 0, 1, -1),         I64(k.stride_dim, 0, 1, 2, -1),
      I64(v.stride_token, 0, 1, -1),        I64(v.stride_head, 0, 1, -1),
      I64(v.stride_dim, 0, 1, 2, -1),       I64(out.stride_batch, 0, 1, -1),
      I64(out.stride_token, 0, 1, -1),      I64(out.stride_head, 0, 1, -1),
      I64(out.stride_dim, 0, 1, 2, -1),     I64(lse.stride_batch, 0, 1, -1),
      I64(lse.stride_head, 0, 1, -1),       I64(lse.stride_token, 0, 1, -1),
  };
  return fields;
}

#undef I32
#undef I64
#undef F32

template <typename T>
void store(void* base, const Field& field, T value) {
  std::memcpy(static_cast<char*>(base) + field.offset, &value, sizeof value);
}

// Overwrites a few fields. `wild` allows values that are not in the table.
void edit(Bytes& in, const std::vector<Field>& fields, void* base, int most, bool wild) {
  for (int left = in.below(most + 1); left > 0; --left) {
    const Field& field = fields[in.byte() % fields.size()];
    const uint8_t choice = in.byte();
    const bool listed = !wild || choice < 0xF0;
    const double value = field.values[choice % field.values.size()];
    switch (field.type) {
      case Field::kI32:
        store(base, field, listed ? static_cast<int32_t>(value) : in.raw<int32_t>());
        break;
      case Field::kI64:
        store(base, field, listed ? static_cast<int64_t>(value) : in.raw<int64_t>());
        break;
      case Field::kF32:
        store(base, field, listed ? static_cast<float>(value) : in.raw<float>());
        break;
    }
  }
}

// ---- Plans -------------------------------------------------------------------------------------

void make_desc(Bytes& in, Sized<sageattn_attn_desc>& sized) {
  sageattn_attn_desc& desc = *sized.get();
  EXPECT(sageattn_attn_desc_init(&desc, sizeof desc, in.below(6), nullptr) == SAGEATTN_OK);
  desc.q_dtype = 1 + in.below(3);
  desc.kv_dtype = in.of({0, 0, 0, 1, 2, 3});
  desc.out_dtype = in.of({0, 0, 0, 1, 2, 3});
  desc.layout = in.below(2);
  desc.batch_mode = in.below(2);
  desc.mask = in.below(4);
  if (desc.mask == SAGEATTN_MASK_WINDOW) {
    desc.window_left = in.below(48) - 1;
    desc.window_right = in.below(48) - 1;
  }
  desc.head_dim = in.of({64, 128, 32, 16, 1, 3, 63, 80, 96, 160, 256});
  desc.head_dim_v = in.of({0, 0, 64, 128, 1, 5, 96, 256});
  desc.num_kv_heads = 1 + in.below(2);
  desc.num_qo_heads = desc.num_kv_heads * (1 + in.below(3));
  if (in.rarely()) {
    desc.sm_scale_set = 1;
    desc.sm_scale = in.of({0.0f, 0.1f, -0.1f, 1.0f, 2.0f});
  }
  desc.max_batch = in.below(4);
  desc.max_qo_len = 1 + in.byte() % 80;
  desc.max_kv_len = 1 + in.byte() % 150;
  edit(in, attn_fields(), &desc, 5, true);
  sized.vary_size(in, 1);
}

void check_info(const sageattn_plan_info& info, const sageattn_attn_desc& desc) {
  const auto within = [](int32_t value, int32_t low, int32_t high) {
    return low <= value && value <= high;
  };
  EXPECT(info.struct_size == sizeof info);
  EXPECT(info.backend == SAGEATTN_BACKEND_CPU);
  EXPECT(info.origin == SAGEATTN_ORIGIN_BUILTIN);
  EXPECT(info.arch == 80 || info.arch == 86 || info.arch == 89 || info.arch == 90 ||
         info.arch == 120);
  EXPECT(info.min_workspace >= 0 && info.min_workspace <= info.preferred_workspace);
  EXPECT(info.workspace_alignment > 0 &&
         (info.workspace_alignment & (info.workspace_alignment - 1)) == 0);
  EXPECT(within(info.b_q, 1, 1024) && within(info.b_k, 1, 1024));
  EXPECT(info.promotion_interval >= 0 && info.promotion_interval % 32 == 0);
  EXPECT(info.q_dtype == desc.q_dtype);
  EXPECT(info.kv_dtype == (desc.kv_dtype != 0 ? desc.kv_dtype : desc.q_dtype));
  EXPECT(info.out_dtype == (desc.out_dtype != 0 ? desc.out_dtype : desc.q_dtype));
  EXPECT(info.head_dim_v == (desc.head_dim_v != 0 ? desc.head_dim_v : desc.head_dim));
  EXPECT(within(info.head_dim_v, 1, 256));
  EXPECT(info.num_kv_heads == (desc.num_kv_heads != 0 ? desc.num_kv_heads : desc.num_qo_heads));
  EXPECT(desc.num_qo_heads % info.num_kv_heads == 0);
  EXPECT(std::isfinite(info.sm_scale));
  EXPECT(within(info.qk_format, 1, 4) && within(info.pv_format, 1, 5));
  EXPECT(within(info.smooth_q, 1, 2) && within(info.smooth_k, 1, 2));
  EXPECT(within(info.smooth_v, 1, 3) && within(info.rotation, 0, 2));
  EXPECT((info.qk_format == SAGEATTN_QK_NONE) == (info.pv_format == SAGEATTN_PV_NONE));
  const int32_t low = info.qk_format == SAGEATTN_QK_NONE ? 0 : 1;  // 0: does not apply
  const int32_t high = info.qk_format == SAGEATTN_QK_NONE ? 0 : 5;
  EXPECT(within(info.qk_granularity, low, high) && within(info.pv_accum, low, std::min(high, 4)));
  EXPECT(within(info.v_scale, low, std::min(high, 2)));
  EXPECT(within(info.row_sum, low, std::min(high, 2)));
  EXPECT(within(info.kernel, low, std::min(high, 2)));
  EXPECT(within(info.pv_model, 0, std::min(high, 2)));
  EXPECT(std::memchr(info.kernel_name, 0, sizeof info.kernel_name) != nullptr);
  EXPECT(info.kernel_name[0] != 0);
  EXPECT(desc.bias == 0 && desc.num_sinks == 0 && desc.kv_storage == 0 && desc.softcap == 0);
}

struct PlanDeleter {
  void operator()(sageattn_plan* plan) const { sageattn_plan_destroy(plan); }
};
using Plan = std::unique_ptr<sageattn_plan, PlanDeleter>;

// Creates a plan; null if the library refuses, after checking that it refuses well.
Plan make_plan(Bytes& in, sageattn_context* context, Sized<sageattn_attn_desc>& desc,
               sageattn_plan_info& info) {
  const auto before = desc.bytes;
  Error error(in);
  auto* plan = reinterpret_cast<sageattn_plan*>(&error);  // anything but null
  const int32_t status = sageattn_plan_create(context, desc.get(), &plan, error.get());
  error.check(status);
  EXPECT(desc.bytes == before);
  EXPECT((plan != nullptr) == (status == SAGEATTN_OK));
  if (desc.has_tail()) EXPECT(status == SAGEATTN_E_UNKNOWN_FIELD);

  sageattn_plan_info queried{};
  queried.struct_size = sizeof queried;
  EXPECT(sageattn_plan_query(context, desc.get(), &queried, nullptr) == status);
  if (status != SAGEATTN_OK) return nullptr;
  Plan owner(plan);
  info = {};
  info.struct_size = sizeof info;
  EXPECT(sageattn_plan_get_info(plan, &info, nullptr) == SAGEATTN_OK);
  check_info(info, desc.seen());
  EXPECT(std::memcmp(&info, &queried, sizeof info) == 0);
  return owner;
}

// ---- Tensors -----------------------------------------------------------------------------------

size_t element_size(int32_t dtype) { return dtype == SAGEATTN_F32 ? 4 : 2; }

struct Shape {
  std::array<int64_t, 4> size;    // batch, token, head, channel
  std::array<int64_t, 4> stride;  // in elements, for dimensions larger than 1

  int64_t elements() const { return size[0] * size[1] * size[2] * size[3]; }

  // Offsets of the lowest and of the highest element.
  void span(int64_t& low, int64_t& high) const {
    low = high = 0;
    for (int i = 0; i < 4; ++i) {
      if (size[i] <= 1) continue;
      const int64_t reach = stride[i] * (size[i] - 1);
      (reach < 0 ? low : high) += reach;
    }
  }
  int64_t offset(int64_t b, int64_t t, int64_t h, int64_t c) const {
    const std::array<int64_t, 4> index = {b, t, h, c};
    int64_t sum = 0;
    for (int i = 0; i < 4; ++i) sum += index[i] == 0 ? 0 : index[i] * stride[i];
    return sum;
  }
};

// Strides of a tensor whose dimensions are nested in an arbitrary order with gaps. A size of
// kAbsent marks a dimension that the tensor does not have.
constexpr int64_t kAbsent = -1;
std::array<int64_t, 4> random_strides(Bytes& in, const std::array<int64_t, 4>& size, bool expand) {
  std::array<int, 4> order = {0, 1, 2, 3};
  for (int n = in.below(24); n > 0; --n) std::next_permutation(order.begin(), order.end());
  std::array<int64_t, 4> stride{};
  int64_t next = 1;
  for (int i : order) {
    if (size[i] == kAbsent) continue;
    const uint8_t choice = in.byte();
    stride[i] = next + (choice & 16 ? choice & 3 : 0);
    next = stride[i] * std::max<int64_t>(size[i], 1);
    if (choice & 32) stride[i] = -stride[i];
    if (expand && choice >= 0xF0 && i != 3) stride[i] = 0;
    if (size[i] == 1 && choice & 64) stride[i] = in.raw<int64_t>();  // means nothing
  }
  return stride;
}

// Contiguous if all strides are zero, as the header says.
Shape resolve(std::array<int64_t, 4> size, std::array<int64_t, 4> stride, bool hnd) {
  if (stride == std::array<int64_t, 4>{}) {
    stride[3] = 1;
    stride[2] = hnd ? size[1] * size[3] : size[3];
    stride[1] = hnd ? size[3] : size[2] * size[3];
    stride[0] = size[1] * size[2] * size[3];
  }
  return {size, stride};
}

// The buffer of one tensor: just its span.
class TensorMemory {
 public:
  bool allocate(const Shape& shape, size_t element, size_t offset) {
    int64_t low = 0, high = -1;
    for (int i = 0; i < 4; ++i) {
      if (shape.size[i] > 1 && std::abs(shape.stride[i]) > kMaxElements) return false;
    }
    if (shape.elements() > 0) shape.span(low, high);
    if (high - low + 1 > 4 * kMaxElements) return false;
    low_ = low * static_cast<int64_t>(element);
    memory_ = std::make_unique<Guarded>(static_cast<size_t>(high - low + 1) * element, 64, offset);
    return true;
  }
  unsigned char* first() { return memory_->data() - low_; }  // element 0 of every dimension
  Guarded& memory() { return *memory_; }

 private:
  int64_t low_ = 0;
  std::unique_ptr<Guarded> memory_;
};

class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed * 2 + 1) {}
  uint32_t next() {
    state_ ^= state_ << 13;
    state_ ^= state_ >> 7;
    state_ ^= state_ << 17;
    return static_cast<uint32_t>((state_ * 0x2545F4914F6CDD1Dull) >> 32);
  }

 private:
  uint64_t state_;
};

enum class Values { kTame, kZero, kWild };

// Tame values have magnitudes from 1/64 to 4.
void fill_values(Guarded& memory, int32_t dtype, Values values, Random& random) {
  if (values == Values::kZero) return memory.fill(0);
  unsigned char* data = memory.data();
  const size_t element = element_size(dtype);
  for (size_t i = 0; i + element <= memory.size(); i += element) {
    uint32_t bits = random.next();
    if (values == Values::kTame) {
      const uint32_t exponent = (bits >> 24) % 8;
      if (dtype == SAGEATTN_F16) bits = (bits & 0x83FF) | (9 + exponent) << 10;
      if (dtype == SAGEATTN_BF16) bits = (bits & 0x807F) | (121 + exponent) << 7;
      if (dtype == SAGEATTN_F32) bits = (bits & 0x807FFFFF) | (121 + exponent) << 23;
    }
    std::memcpy(data + i, &bits, element);  // little endian, as is everything here
  }
}

bool is_finite_or_nan(const unsigned char* data, int32_t dtype, bool& nan) {
  uint32_t bits = 0;
  std::memcpy(&bits, data, element_size(dtype));
  const int mantissa = dtype == SAGEATTN_F16 ? 10 : dtype == SAGEATTN_BF16 ? 7 : 23;
  const uint32_t exponent_mask = dtype == SAGEATTN_F16 ? 0x1F : 0xFF;
  const bool special = (bits >> mantissa & exponent_mask) == exponent_mask;
  nan = special && (bits & ((1u << mantissa) - 1)) != 0;
  return !special || nan;
}

// ---- Execute -----------------------------------------------------------------------------------

// What one row of out and of lse must be after a successful execute.
enum class Row { kUntouched, kWritten, kNaN, kMaybeNaN };

struct Limits {
  int64_t batch, qo_len, kv_len, total_qo, total_kv;
  bool varlen;
};

Limits limits_of(const sageattn_attn_desc& desc) {
  Limits limits{};
  limits.varlen = desc.batch_mode == SAGEATTN_BATCH_VARLEN;
  limits.batch = desc.max_batch != 0 ? desc.max_batch : 1;
  limits.qo_len = desc.max_qo_len;
  limits.kv_len = desc.max_kv_len;
  limits.total_qo = desc.max_total_qo != 0 ? desc.max_total_qo : limits.batch * limits.qo_len;
  limits.total_kv = desc.max_total_kv != 0 ? desc.max_total_kv : limits.batch * limits.kv_len;
  return limits;
}

bool lengths_are_legal(const sageattn_execute_args& args, const Limits& limits) {
  const auto within = [](int64_t value, int64_t limit) { return value >= 0 && value <= limit; };
  if (!within(args.batch, limits.batch)) return false;
  if (limits.varlen) {
    return args.qo_len == 0 && args.kv_len == 0 && within(args.total_qo, limits.total_qo) &&
           within(args.total_kv, limits.total_kv);
  }
  return within(args.qo_len, limits.qo_len) && within(args.kv_len, limits.kv_len) &&
         args.total_qo == 0 && args.total_kv == 0;
}

// Entries that cut `total` into batch pieces of at most `limit`; sometimes nonsense.
std::vector<int32_t> make_cuts(Bytes& in, int64_t batch, int64_t limit, int64_t total) {
  std::vector<int32_t> cuts(static_cast<size_t>(batch) + 1);
  int64_t at = 0;
  for (size_t i = 1; i < cuts.size(); ++i) {
    at = std::min(total, at + in.byte() % (std::min<int64_t>(limit, 255) + 1));
    cuts[i] = static_cast<int32_t>(at);
  }
  if (in.rarely()) {
    cuts[static_cast<size_t>(in.below(static_cast<int>(cuts.size())))] =
        in.below(2) == 0 ? in.below(100) - 10 : in.raw<int32_t>();
  }
  return cuts;
}

// Whether sequence b is nonsense by one of its cumulative arrays, and its rows.
bool bad_cut(const std::vector<int32_t>& cuts, size_t b, int64_t limit, int64_t total) {
  const int64_t start = cuts[b], end = cuts[b + 1];
  const int64_t highest = *std::max_element(cuts.begin(), cuts.begin() + b + 1);
  return start < 0 || start < highest || end < start || end > total || end - start > limit;
}

class Execution {
 public:
  Execution(Bytes& in, const sageattn_attn_desc& desc, const sageattn_plan_info& info)
      : desc_(desc), info_(info), limits_(limits_of(desc)) {
    prepare(in);
  }

  // Runs with the plan twice, with outputs that held different bytes before.
  void run(Bytes& in, const sageattn_plan* one_thread, const sageattn_plan* three_threads,
           const sageattn_plan_info& three_threads_info) {
    if (!possible_) return;
    const int32_t status = call(in, one_thread, info_, 0);
    const std::vector<unsigned char> out = copy(out_.memory()), lse = copy(lse_.memory()),
                                     words = copy(*status_);
    if (status != SAGEATTN_OK) {
      expect_all(out, kFill[0]);
      expect_all(lse, kFill[0]);
      expect_all(words, kFill[0]);
      return;
    }
    EXPECT(!must_fail_);
    EXPECT(call(in, three_threads, three_threads_info, 1) == SAGEATTN_OK);
    check_elements(out, lse);
    check_status_words(words);
  }

 private:
  static constexpr std::array<unsigned char, 2> kFill = {0xA5, 0x36};

  void prepare(Bytes& in) {
    sageattn_execute_args& args = *args_.get();
    args.batch = static_cast<int32_t>(in.byte() % (std::min<int64_t>(limits_.batch, 3) + 1));
    const int64_t qo = in.byte() % (std::min<int64_t>(limits_.qo_len, 96) + 1);
    const int64_t kv = in.byte() % (std::min<int64_t>(limits_.kv_len, 160) + 1);
    if (limits_.varlen) {
      args.total_qo = std::min(args.batch * qo, limits_.total_qo);
      args.total_kv = std::min(args.batch * kv, limits_.total_kv);
    } else {
      args.qo_len = static_cast<int32_t>(qo);
      args.kv_len = static_cast<int32_t>(kv);
    }
    const auto sizes = [&](bool query, int64_t heads, int64_t channels) {
      const int64_t tokens = limits_.varlen ? (query ? args.total_qo : args.total_kv)
                             : query        ? args.qo_len
                                            : args.kv_len;
      return std::array<int64_t, 4>{limits_.varlen ? kAbsent : args.batch, tokens, heads, channels};
    };
    const auto strides = [&](auto& tensor, bool query, int64_t heads, int64_t channels,
                             bool expand) {
      if (in.below(2) == 0) return;
      const auto s = random_strides(in, sizes(query, heads, channels), expand);
      tensor.stride_batch = s[0];
      tensor.stride_token = s[1];
      tensor.stride_head = s[2];
      tensor.stride_dim = s[3];
    };
    strides(args.q, true, desc_.num_qo_heads, desc_.head_dim, true);
    strides(args.k, false, info_.num_kv_heads, desc_.head_dim, true);
    strides(args.v, false, info_.num_kv_heads, info_.head_dim_v, true);
    strides(args.out, true, desc_.num_qo_heads, info_.head_dim_v, in.rarely());
    const uint8_t optional = in.byte();
    const bool with_lse = (optional & 1) != 0;
    if (with_lse && in.below(2) == 1) {
      std::array<int64_t, 4> size = sizes(true, desc_.num_qo_heads, kAbsent);
      const auto s = random_strides(in, size, false);
      args.lse.stride_batch = s[0];
      args.lse.stride_token = s[1];
      args.lse.stride_head = s[2];
    }
    edit(in, args_fields(), &args, 2, false);
    args_.vary_size(in, sizeof(void*));

    // From here on the lengths are what the library sees; memory follows from them.
    const sageattn_execute_args seen = args_.seen();
    must_fail_ = args_.has_tail() || !lengths_are_legal(seen, limits_);
    const auto legal = [](int64_t value, int64_t limit) {
      return std::clamp<int64_t>(value, 0, limit);
    };
    batch_ = legal(seen.batch, limits_.batch);
    const int64_t tokens_q = limits_.varlen ? legal(seen.total_qo, limits_.total_qo)
                                            : legal(seen.qo_len, limits_.qo_len);
    const int64_t tokens_kv = limits_.varlen ? legal(seen.total_kv, limits_.total_kv)
                                             : legal(seen.kv_len, limits_.kv_len);
    if (batch_ > 16 || tokens_q > 1024 || tokens_kv > 1024) return;
    const int64_t items = limits_.varlen ? 1 : batch_;
    const auto shape = [&](const auto& tensor, int64_t tokens, int64_t heads, int64_t channels) {
      return resolve(
          {items, tokens, heads, channels},
          {tensor.stride_batch, tensor.stride_token, tensor.stride_head, tensor.stride_dim},
          desc_.layout == SAGEATTN_LAYOUT_HND);
    };
    const Shape q = shape(seen.q, tokens_q, desc_.num_qo_heads, desc_.head_dim);
    const Shape k = shape(seen.k, tokens_kv, info_.num_kv_heads, desc_.head_dim);
    const Shape v = shape(seen.v, tokens_kv, info_.num_kv_heads, info_.head_dim_v);
    out_shape_ = shape(seen.out, tokens_q, desc_.num_qo_heads, info_.head_dim_v);
    lse_shape_ = lse_shape(seen.lse, items, tokens_q);
    for (const Shape* s : std::initializer_list<const Shape*>{&q, &k, &v, &out_shape_}) {
      if (s->elements() > kMaxElements) return;
    }
    if (items * tokens_q * tokens_kv * desc_.num_qo_heads * (desc_.head_dim + info_.head_dim_v) >
        kMaxProducts) {
      return;
    }
    if (info_.min_workspace > kMaxWorkspace) return;
    const auto offset = [&] { return in.byte() >= 0xF8 ? size_t{1} : size_t{0}; };
    if (!q_.allocate(q, element_size(info_.q_dtype), offset()) ||
        !k_.allocate(k, element_size(info_.kv_dtype), offset()) ||
        !v_.allocate(v, element_size(info_.kv_dtype), offset()) ||
        !out_.allocate(out_shape_, element_size(info_.out_dtype), offset()) ||
        !lse_.allocate(lse_shape_, sizeof(float), offset())) {
      return;
    }

    const uint8_t kind = in.byte();
    values_ = kind < 0xC0 ? Values::kTame : kind < 0xD0 ? Values::kZero : Values::kWild;
    Random random(kind);
    fill_values(q_.memory(), info_.q_dtype, values_, random);
    fill_values(k_.memory(), info_.kv_dtype, values_, random);
    fill_values(v_.memory(), info_.kv_dtype, values_, random);

    args.q.data = q_.first();
    args.k.data = k_.first();
    args.v.data = v_.first();
    args.out.data = out_.first();
    if (with_lse) args.lse.data = reinterpret_cast<float*>(lse_.first());
    if (limits_.varlen) {
      cuts_q_ = make_cuts(in, batch_, limits_.qo_len, tokens_q);
      cuts_kv_ = make_cuts(in, batch_, limits_.kv_len, tokens_kv);
      args.cu_seqlens_q = cuts_q_.data();
      args.cu_seqlens_kv = cuts_kv_.data();
    }
    if (optional & 2) {
      for (int64_t b = 0; b < batch_; ++b) {
        const int64_t length =
            limits_.varlen
                ? static_cast<int64_t>(cuts_kv_[static_cast<size_t>(b) + 1]) - cuts_kv_[b]
                : tokens_kv;
        const bool nonsense = in.rarely();
        used_.push_back(
            nonsense ? in.raw<int32_t>()
                     : static_cast<int32_t>(in.byte() % (std::clamp<int64_t>(length, 0, 255) + 1)));
      }
      used_.push_back(-7);  // so that the array is never empty; not to be read
      args.seqused_kv = used_.data();
    }
    status_ = std::make_unique<Guarded>(static_cast<size_t>(batch_) * sizeof(int32_t), 16);
    if (optional & 4) args.status = reinterpret_cast<int32_t*>(status_->data());

    // Pointers that are wrong in ways that the library must notice.
    switch (in.byte()) {
      case 0xF0:
        args.q.data = nullptr;
        break;
      case 0xF1:
        args.v.data = nullptr;
        break;
      case 0xF2:
        args.out.data = nullptr;
        break;
      case 0xF3:
        args.cu_seqlens_q = nullptr;
        break;
      case 0xF4:
        args.cu_seqlens_kv = nullptr;
        break;
      case 0xF5:
        alias(q, args.q.data, info_.q_dtype, args);
        break;
      case 0xF6:
        alias(v, args.v.data, info_.kv_dtype, args);
        break;
      case 0xF7:
        if (!limits_.varlen) {
          cuts_q_ = {0, 0};
          args.cu_seqlens_q = cuts_q_.data();
          must_fail_ = true;
        }
        break;
      default:
        break;
    }
    const sageattn_execute_args last = args_.seen();
    must_fail_ |= tensor_missing(last.q.data, q) || tensor_missing(last.k.data, k) ||
                  tensor_missing(last.v.data, v) || tensor_missing(last.out.data, out_shape_);
    if (limits_.varlen && batch_ > 0) {
      must_fail_ |= last.cu_seqlens_q == nullptr || last.cu_seqlens_kv == nullptr;
    }
    has_lse_ = last.lse.data != nullptr;
    has_status_ = last.status != nullptr;
    if (last.seqused_kv == nullptr) used_.clear();
    possible_ = true;
  }

  Shape lse_shape(const sageattn_lse_tensor& lse, int64_t items, int64_t tokens) const {
    std::array<int64_t, 4> stride = {lse.stride_batch, lse.stride_token, lse.stride_head, 0};
    const std::array<int64_t, 4> size = {items, tokens, desc_.num_qo_heads, 1};
    if (stride == std::array<int64_t, 4>{}) stride = {size[1] * size[2], 1, size[1], 0};
    return {size, stride};
  }

  static bool tensor_missing(const void* data, const Shape& shape) {
    return data == nullptr && shape.elements() > 0;
  }

  // Writes over an input, if the output is no larger.
  void alias(const Shape& input, const void* data, int32_t dtype, sageattn_execute_args& args) {
    int64_t low = 0, high = 0, out_low = 0, out_high = 0;
    if (input.elements() == 0 || out_shape_.elements() == 0) return;
    input.span(low, high);
    out_shape_.span(out_low, out_high);
    const auto bytes = static_cast<int64_t>(element_size(dtype));
    const auto out_bytes = static_cast<int64_t>(element_size(info_.out_dtype));
    if (out_low * out_bytes < low * bytes || (out_high + 1) * out_bytes > (high + 1) * bytes)
      return;
    args.out.data = const_cast<void*>(data);
    must_fail_ = true;  // the first elements, at least, share an address
  }

  int32_t call(Bytes& in, const sageattn_plan* plan, const sageattn_plan_info& info, size_t round) {
    out_.memory().fill(kFill[round]);
    lse_.memory().fill(kFill[round]);
    status_->fill(kFill[round]);
    const auto q = copy(q_.memory()), k = copy(k_.memory()), v = copy(v_.memory());
    const auto args = args_.bytes;
    const auto cuts_q = cuts_q_, cuts_kv = cuts_kv_, used = used_;

    int64_t size = info.min_workspace;
    const uint8_t choice = in.byte();
    if (round == 0) {
      if (choice >= 0xC0) size = std::min(info.preferred_workspace, kMaxWorkspace);
      if (choice >= 0xF8 && info.min_workspace > 0) {
        size = info.min_workspace - 1;
        must_fail_ = true;
      }
    }
    Guarded workspace(static_cast<size_t>(size), static_cast<size_t>(info.workspace_alignment));
    workspace.fill(kFill[1 - round]);
    Error error(in);
    const int32_t status = sageattn_execute(plan, args_.get(), workspace.data(),
                                            static_cast<size_t>(size), nullptr, error.get());
    error.check(status);
    workspace.check();
    q_.memory().check();
    k_.memory().check();
    v_.memory().check();
    out_.memory().check();
    lse_.memory().check();
    status_->check();
    EXPECT(copy(q_.memory()) == q && copy(k_.memory()) == k && copy(v_.memory()) == v);
    EXPECT(args_.bytes == args && cuts_q_ == cuts_q && cuts_kv_ == cuts_kv && used_ == used);
    return status;
  }

  static std::vector<unsigned char> copy(Guarded& memory) {
    return {memory.data(), memory.data() + memory.size()};
  }
  static void expect_all(const std::vector<unsigned char>& bytes, unsigned char value) {
    EXPECT(std::all_of(bytes.begin(), bytes.end(), [&](unsigned char b) { return b == value; }));
  }

  bool nonsense(size_t b) const {
    const int64_t used = used_.empty() ? 0 : used_[b];
    if (!limits_.varlen) return used < 0 || used > args_.seen().kv_len;
    return bad_cut(cuts_q_, b, limits_.qo_len, out_shape_.size[1]) ||
           bad_cut(cuts_kv_, b, limits_.kv_len, args_.seen().total_kv) || used < 0 ||
           used > static_cast<int64_t>(cuts_kv_[b + 1]) - cuts_kv_[b];
  }

  // Of each token of out, [batch][token] or varlen [token].
  std::vector<Row> rows() const {
    const int64_t tokens = out_shape_.size[1];
    std::vector<Row> rows(static_cast<size_t>(out_shape_.size[0] * tokens), Row::kUntouched);
    int64_t highest = 0;  // entry so far
    for (int64_t b = 0; b < batch_; ++b) {
      const bool bad = nonsense(static_cast<size_t>(b));
      int64_t first = b * tokens, last = first + tokens, sure = first;
      if (limits_.varlen) {
        first = cuts_q_[static_cast<size_t>(b)];
        last = std::min<int64_t>(cuts_q_[static_cast<size_t>(b) + 1], tokens);
        sure = highest = std::max(highest, first);
      }
      for (int64_t row = std::max<int64_t>(first, 0); row < last; ++row) {
        Row& expected = rows[static_cast<size_t>(row)];
        if (!bad) {
          expected = Row::kWritten;
        } else if (expected != Row::kWritten) {
          // Which rows a sequence calls its own is only sure where it does not start too early.
          const bool own = row >= sure && row < first + limits_.qo_len;
          expected = own && expected == Row::kUntouched ? Row::kNaN : Row::kMaybeNaN;
        }
      }
    }
    return rows;
  }

  // `out` and `lse` hold the bytes of the first run, the buffers those of the second.
  void check_elements(std::vector<unsigned char> out, std::vector<unsigned char> lse) {
    const std::vector<Row> expected = rows();
    // Elements that are checked become equal in both, so that what is left must be untouched.
    for (size_t row = 0; row < expected.size(); ++row) {
      const auto tokens = static_cast<size_t>(out_shape_.size[1]);
      const auto b = static_cast<int64_t>(row / tokens), t = static_cast<int64_t>(row % tokens);
      for (int64_t h = 0; h < desc_.num_qo_heads; ++h) {
        for (int64_t c = 0; c < info_.head_dim_v; ++c) {
          check_element(out_, out, out_shape_.offset(b, t, h, c), info_.out_dtype, expected[row],
                        false);
        }
        if (has_lse_) {
          check_element(lse_, lse, lse_shape_.offset(b, t, h, 0), SAGEATTN_F32, expected[row],
                        true);
        }
      }
    }
    expect_all(out, kFill[0]);
    expect_all(lse, kFill[0]);
    expect_all(copy(out_.memory()), kFill[1]);
    expect_all(copy(lse_.memory()), kFill[1]);
  }

  void check_element(TensorMemory& tensor, std::vector<unsigned char>& first, int64_t offset,
                     int32_t dtype, Row row, bool is_lse) {
    const size_t element = element_size(dtype);
    unsigned char* b = tensor.first() + offset * static_cast<int64_t>(element);
    unsigned char* a = first.data() + (b - tensor.memory().data());
    const auto holds = [&](const unsigned char* data, unsigned char value) {
      return std::all_of(data, data + element, [&](unsigned char x) { return x == value; });
    };
    const bool untouched = holds(a, kFill[0]) && holds(b, kFill[1]);
    if (row == Row::kUntouched || (row == Row::kMaybeNaN && untouched)) {
      EXPECT(untouched);
    } else {
      EXPECT(std::memcmp(a, b, element) == 0);
      bool nan = false;
      const bool no_infinity = is_finite_or_nan(a, dtype, nan);
      if (row != Row::kWritten) EXPECT(nan);
      if (row == Row::kWritten && values_ != Values::kWild && std::fabs(info_.sm_scale) <= 2) {
        EXPECT(!nan && (no_infinity || is_lse));
      }
    }
    std::memset(a, kFill[0], element);
    std::memset(b, kFill[1], element);
  }

  void check_status_words(const std::vector<unsigned char>& bytes) const {
    if (!has_status_) return expect_all(bytes, kFill[0]);
    for (int64_t b = 0; b < batch_; ++b) {
      int32_t word;
      std::memcpy(&word, bytes.data() + b * static_cast<int64_t>(sizeof word), sizeof word);
      EXPECT(word == (nonsense(static_cast<size_t>(b)) ? SAGEATTN_SEQUENCE_BAD_LENGTHS
                                                       : SAGEATTN_SEQUENCE_OK));
    }
  }

  const sageattn_attn_desc desc_;
  const sageattn_plan_info info_;
  const Limits limits_;
  Sized<sageattn_execute_args> args_;
  TensorMemory q_, k_, v_, out_, lse_;
  Shape out_shape_{}, lse_shape_{};
  std::vector<int32_t> cuts_q_, cuts_kv_, used_;
  std::unique_ptr<Guarded> status_;
  int64_t batch_ = 0;
  Values values_ = Values::kTame;
  bool has_lse_ = false, has_status_ = false;
  bool must_fail_ = false;
  bool possible_ = false;  // small enough to be run
};

void fuzz_execute(Bytes& in) {
  const int arch = in.below(6);
  Sized<sageattn_attn_desc> desc;
  make_desc(in, desc);
  sageattn_plan_info info, other_info;
  const Plan plan = make_plan(in, g_contexts.get(arch, 0), desc, info);
  if (!plan) return;
  const Plan other = make_plan(in, g_contexts.get(arch, 1), desc, other_info);
  EXPECT(other != nullptr);
  Execution execution(in, desc.seen(), info);
  execution.run(in, plan.get(), other.get(), other_info);
}

// ---- The other functions -----------------------------------------------------------------------

void fuzz_compare(Bytes& in) {
  Sized<sageattn_compare_args> sized;
  sageattn_compare_args& args = *sized.get();
  args.out_dtype = in.rarely() ? in.raw<int32_t>() : 1 + in.below(3);
  args.ref_dtype = in.rarely() ? in.raw<int32_t>() : 1 + in.below(3);
  args.layout = in.rarely() ? in.raw<int32_t>() : in.below(2);
  args.batch = in.below(4);
  args.len = in.below(20);
  args.num_heads = in.below(4);
  args.head_dim = in.below(70);
  const std::array<int64_t, 4> size = {args.batch, args.len, args.num_heads, args.head_dim};
  for (sageattn_const_tensor* tensor : {&args.out, &args.ref}) {
    if (in.below(2) == 0) continue;
    const auto s = random_strides(in, size, true);
    tensor->stride_batch = s[0];
    tensor->stride_token = s[1];
    tensor->stride_head = s[2];
    tensor->stride_dim = s[3];
  }
  if (in.rarely()) args.batch = in.of({-1, 0, 1});
  if (in.rarely()) args.head_dim = in.of({-1, 0, 1});
  sized.vary_size(in, sizeof(void*));

  const sageattn_compare_args seen = sized.seen();
  const auto length = [](int32_t value) { return std::max<int64_t>(value, 0); };
  std::array<TensorMemory, 2> memory;
  for (int i = 0; i < 2; ++i) {
    const sageattn_const_tensor& tensor = i == 0 ? seen.out : seen.ref;
    const int32_t dtype = i == 0 ? seen.out_dtype : seen.ref_dtype;
    const Shape shape = resolve(
        {length(seen.batch), length(seen.len), length(seen.num_heads), length(seen.head_dim)},
        {tensor.stride_batch, tensor.stride_token, tensor.stride_head, tensor.stride_dim},
        seen.layout == SAGEATTN_LAYOUT_HND);
    if (!memory[i].allocate(shape, element_size(dtype), in.byte() >= 0xF8 ? 1 : 0)) return;
    Random random(in.byte());
    fill_values(memory[i].memory(), dtype, in.rarely() ? Values::kWild : Values::kTame, random);
  }
  args.out.data = memory[0].first();
  args.ref.data = in.rarely() ? nullptr : memory[1].first();

  Sized<sageattn_compare_result> result;
  result.vary_size(in, 1);
  const auto before = result.bytes;
  const uint32_t result_size = result.get()->struct_size;
  Error error(in);
  const int32_t status = sageattn_compare(&args, result.get(), error.get());
  error.check(status);
  for (TensorMemory& m : memory) m.memory().check();
  if (status != SAGEATTN_OK) {
    EXPECT(result.bytes == before);
    return;
  }
  const auto known = std::min<size_t>(result_size, sizeof(sageattn_compare_result));
  EXPECT(std::equal(before.begin() + known, before.end(), result.bytes.begin() + known));
  if (known < sizeof(sageattn_compare_result)) return;
  const int64_t elements = int64_t{seen.batch} * seen.len * seen.num_heads * seen.head_dim;
  EXPECT(result.get()->count <= elements);
  EXPECT(result.get()->count + result.get()->nonfinite_out + result.get()->nonfinite_ref >=
         elements);
  EXPECT(!std::isnan(result.get()->cos_sim) && std::fabs(result.get()->cos_sim) < 1.0000001);
}

void fuzz_context(Bytes& in) {
  Sized<sageattn_context_desc> sized;
  sageattn_context_desc& desc = *sized.get();
  desc.flags = in.rarely() ? in.raw<uint32_t>() : static_cast<uint32_t>(in.below(8));
  desc.backend = in.rarely() ? in.raw<int32_t>() : SAGEATTN_BACKEND_CPU;
  desc.device = in.rarely() ? in.raw<int32_t>() : 0;
  desc.target_arch = in.rarely() ? in.raw<int32_t>() : in.of({0, 80, 86, 89, 90, 120});
  desc.num_threads = in.rarely() ? in.raw<int32_t>() : 1 + in.below(4);
  if (in.rarely()) desc.alloc = [](void*, size_t, size_t) -> void* { return nullptr; };
  if (in.rarely()) desc.free = [](void*, void*) {};
  if (in.below(2) == 1) desc.cache_dir = "/nonexistent";
  sized.vary_size(in, sizeof(void*));
  Error error(in);
  auto* context = reinterpret_cast<sageattn_context*>(&error);  // anything but null
  const int32_t status = sageattn_context_create(&desc, &context, error.get());
  error.check(status);
  EXPECT((context != nullptr) == (status == SAGEATTN_OK));
  if (sized.has_tail()) EXPECT(status == SAGEATTN_E_UNKNOWN_FIELD);
  if (context == nullptr) return;

  size_t needed = 0;
  EXPECT(sageattn_context_report(context, nullptr, 0, &needed, nullptr) ==
         SAGEATTN_E_BUFFER_TOO_SMALL);
  EXPECT(needed > 1 && needed < 1 << 20);
  const size_t capacity = in.below(2) == 0 ? needed : in.raw<uint16_t>() % (needed + 1);
  Guarded text(capacity, 1);
  text.fill(0x77);
  Error report_error(in);
  const int32_t report = sageattn_context_report(context, reinterpret_cast<char*>(text.data()),
                                                 capacity, nullptr, report_error.get());
  report_error.check(report);
  text.check();
  EXPECT((report == SAGEATTN_OK) == (capacity >= needed));
  if (report == SAGEATTN_OK) {
    EXPECT(std::memchr(text.data(), 0, capacity) == text.data() + needed - 1);
  } else {
    EXPECT(std::all_of(text.data(), text.data() + capacity,
                       [](unsigned char b) { return b == 0x77; }));
  }

  std::array<unsigned char, 48> blob;
  for (unsigned char& b : blob) b = in.byte();
  Error blob_error(in);
  const int32_t imported =
      sageattn_context_import_blob(context, blob.data(), blob.size(), blob_error.get());
  blob_error.check(imported);
  EXPECT(imported != SAGEATTN_OK);
  sageattn_context_destroy(context);
}

void fuzz_init(Bytes& in) {
  Sized<sageattn_attn_desc> desc;
  desc.bytes.fill(0x77);
  const uint32_t size = in.byte() % (sizeof(sageattn_attn_desc) + 1);
  const int32_t preset = in.rarely() ? in.raw<int32_t>() : in.below(6);
  Error error(in);
  const int32_t status = sageattn_attn_desc_init(desc.get(), size, preset, error.get());
  error.check(status);
  const size_t written = status == SAGEATTN_OK ? size : 0;
  if (status == SAGEATTN_OK) EXPECT(desc.get()->struct_size == size);
  EXPECT(std::all_of(desc.bytes.begin() + written, desc.bytes.end(),
                     [](unsigned char b) { return b == 0x77; }));
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  Bytes in(data, size);
  switch (in.byte() % 16) {
    case 15:
      fuzz_compare(in);
      break;
    case 14:
      fuzz_context(in);
      break;
    case 13:
      fuzz_init(in);
      break;
    default:
      fuzz_execute(in);
      break;
  }
  return 0;
}
