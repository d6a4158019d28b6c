#include "bench.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <deque>
#include <random>
#include <string>
#include <utility>

#include "half.h"
#include "src/cuda/backend.h"
#include "src/cuda/memory.h"
#include "tensor_io.h"

namespace sageattn_cli {
namespace {

namespace cuda = sageattn::cuda;

// Prime, so that rows and heads, which lie powers of two apart, differ.
constexpr size_t kNoisePeriod = 1000003;
constexpr size_t kAlignment = 256;

std::vector<std::byte> normal_noise(int32_t dtype) {
  std::mt19937_64 random(1);
  std::normal_distribution<float> normal;
  const size_t size = size_of(type_of_dtype(dtype));
  std::vector<std::byte> noise(kNoisePeriod * size);
  for (size_t at = 0; at < noise.size(); at += size) {
    const float value = normal(random);
    const uint16_t half = dtype == SAGEATTN_F16 ? f16_from_f32(value) : bf16_from_f32(value);
    std::memcpy(&noise[at], size == sizeof half ? static_cast<const void*>(&half) : &value, size);
  }
  return noise;
}

double median(std::vector<double> values) {
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

// A tensor several times over, on a device or, without one, in host memory.
class Tensors {
 public:
  Tensors(Device* device, size_t count, size_t bytes)
      : device_(device), stride_((bytes + kAlignment - 1) / kAlignment * kAlignment) {
    if (device != nullptr) {
      data_ = static_cast<std::byte*>(device->allocate(count * stride_));
    } else {
      host_.resize(count * stride_);
      data_ = host_.data();
    }
    size_ = count * stride_;
  }
  Tensors(const Tensors&) = delete;
  Tensors& operator=(const Tensors&) = delete;

  // Repeats `values`, beginning with that at `start`, in bytes.
  void fill(const std::vector<std::byte>& values, size_t start) {
    for (size_t at = 0; at < size_; start = 0) {
      const size_t bytes = std::min(values.size() - start, size_ - at);
      if (device_ != nullptr) {
        device_->write(data_, at, &values[start], bytes);
      } else {
        std::memcpy(data_ + at, &values[start], bytes);
      }
      at += bytes;
    }
  }

  std::byte* operator[](size_t index) const { return data_ + index * stride_; }

 private:
  Device* device_;
  size_t stride_, size_;
  std::byte* data_;
  std::vector<std::byte> host_;
};

// Arguments of one execute after the other.
class Operands {
 public:
  Operands(const Plan& plan, const sageattn_attn_desc& desc, bool lse, size_t l2_bytes,
           const std::vector<std::byte>& noise)
      : tokens_(static_cast<size_t>(desc.max_batch) * static_cast<size_t>(desc.max_qo_len)),
        element_(size_of(type_of_dtype(desc.q_dtype))),
        q_bytes_(bytes(desc, desc.num_qo_heads)),
        kv_bytes_(bytes(desc, plan.info().num_kv_heads)),
        count_(count_beyond(plan.device() != nullptr ? l2_bytes : 0)),
        q_(plan.device(), count_, q_bytes_),
        k_(plan.device(), count_, kv_bytes_),
        v_(plan.device(), count_, kv_bytes_),
        out_(plan.device(), count_, q_bytes_),
        lse_(plan.device(), count_,
             lse ? tokens_ * static_cast<size_t>(desc.num_qo_heads) * sizeof(float) : 0),
        args_(sized<sageattn_execute_args>()),
        with_lse_(lse) {
    const size_t third = noise.size() / element_ / 3 * element_;
    q_.fill(noise, 0);
    k_.fill(noise, third);
    v_.fill(noise, 2 * third);
    args_.batch = desc.max_batch;
    args_.qo_len = args_.kv_len = desc.max_qo_len;
  }

  size_t count() const { return count_; }

  const sageattn_execute_args& next() {
    args_.q.data = q_[turn_];
    args_.k.data = k_[turn_];
    args_.v.data = v_[turn_];
    args_.out.data = out_[turn_];
    if (with_lse_) args_.lse.data = reinterpret_cast<float*>(lse_[turn_]);
    turn_ = (turn_ + 1) % count_;
    return args_;
  }

 private:
  size_t bytes(const sageattn_attn_desc& desc, int32_t heads) const {
    return tokens_ * static_cast<size_t>(heads) * static_cast<size_t>(desc.head_dim) * element_;
  }
  // Between two uses of a set, the others fill the cache.
  size_t count_beyond(size_t cache_bytes) const {
    const size_t set = 2 * (q_bytes_ + kv_bytes_);
    return set > cache_bytes ? 1 : 1 + (cache_bytes + set - 1) / set;
  }

  size_t tokens_, element_, q_bytes_, kv_bytes_, count_;
  Tensors q_, k_, v_, out_, lse_;
  sageattn_execute_args args_;
  bool with_lse_;
  size_t turn_ = 0;
};

// Records an event on either side of each launch.
class Stopwatch final : public cuda::Observer {
 public:
  Stopwatch(std::string attention, const cuda::Driver& api, cuda::Stream stream)
      : attention_(std::move(attention)), api_(api), stream_(stream) {}

  void before(const std::string& kernel, int64_t) override {
    laps_.push_back({kernel == attention_, cuda::EventOwner(api_), cuda::EventOwner(api_)});
    laps_.back().start.record(stream_);
  }
  void after() override { laps_.back().end.record(stream_); }

  // When the stream has run.
  LaunchTimes read() const {
    LaunchTimes times;
    for (const Lap& lap : laps_) {
      (lap.attention ? times.attention : times.preparation) += lap.end.ms_since(lap.start);
    }
    return times;
  }

 private:
  struct Lap {
    bool attention;
    cuda::EventOwner start, end;
  };
  const std::string attention_;
  const cuda::Driver& api_;
  cuda::Stream stream_;
  std::vector<Lap> laps_;
};

double time_on_cpu(Plan& plan, Operands& operands, size_t repeat, size_t warmup) {
  std::vector<double> times;
  for (size_t i = 0; i < warmup + repeat; ++i) {
    const sageattn_execute_args& args = operands.next();
    const auto start = std::chrono::steady_clock::now();
    plan.execute(args);
    const std::chrono::duration<double, std::milli> elapsed =
        std::chrono::steady_clock::now() - start;
    if (i >= warmup) times.push_back(elapsed.count());
  }
  return median(std::move(times));
}

// Executes are enqueued one behind the other, so that none waits for the host.
double time_executes(Plan& plan, Operands& operands, size_t repeat, size_t warmup) {
  const cuda::Driver& api = cuda::driver();
  const cuda::StreamOwner stream(api);
  for (size_t i = 0; i < warmup; ++i) plan.enqueue(operands.next(), stream.get());
  std::vector<cuda::EventOwner> events;
  for (size_t i = 0; i <= repeat; ++i) events.emplace_back(api);
  events.front().record(stream.get());
  for (size_t i = 1; i <= repeat; ++i) {
    plan.enqueue(operands.next(), stream.get());
    events[i].record(stream.get());
  }
  stream.wait();
  std::vector<double> times;
  for (size_t i = 1; i <= repeat; ++i) times.push_back(events[i].ms_since(events[i - 1]));
  return median(std::move(times));
}

LaunchTimes time_launches(Plan& plan, Operands& operands, size_t repeat) {
  auto attention = sized<sageattn_kernel_info>();
  check([&](sageattn_error* error) {
    return sageattn_plan_get_kernel(plan.handle(), plan.info().num_kernels - 1, &attention, error);
  });
  const cuda::Driver& api = cuda::driver();
  const cuda::StreamOwner stream(api);
  plan.enqueue(operands.next(), stream.get());  // the GPU is at work when the first event comes
  std::deque<Stopwatch> stopwatches;
  for (size_t i = 0; i < repeat; ++i) {
    stopwatches.emplace_back(attention.name, api, stream.get());
    plan.enqueue(operands.next(), stream.get(), &stopwatches.back());
  }
  stream.wait();
  std::vector<double> attention_times, preparation_times;
  for (const Stopwatch& stopwatch : stopwatches) {
    const LaunchTimes times = stopwatch.read();
    attention_times.push_back(times.attention);
    preparation_times.push_back(times.preparation);
  }
  return {median(std::move(attention_times)), median(std::move(preparation_times))};
}

}  // namespace

Bench::Bench(const Context& context, int32_t dtype, int32_t repeat, int32_t warmup,
             int64_t l2_bytes)
    : context_(context),
      repeat_(static_cast<size_t>(repeat)),
      warmup_(static_cast<size_t>(warmup)),
      l2_bytes_(static_cast<size_t>(l2_bytes)),
      noise_(normal_noise(dtype)) {}

Timing Bench::time(const sageattn_attn_desc& desc, bool lse, sageattn_plan_info& info) const {
  Plan plan(context_, desc);
  info = plan.info();
  Operands operands(plan, desc, lse, l2_bytes_, noise_);
  if (plan.device() == nullptr) {
    return {time_on_cpu(plan, operands, repeat_, warmup_), {}, operands.count()};
  }
  return guarded([&]() -> Timing {
    const double milliseconds = time_executes(plan, operands, repeat_, warmup_);
    return {milliseconds, time_launches(plan, operands, repeat_), operands.count()};
  });
}

}  // namespace sageattn_cli
