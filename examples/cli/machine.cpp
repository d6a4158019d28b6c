#include "machine.h"

#include <fstream>

#include "src/cuda/device.h"

namespace sageattn_cli {
namespace {

namespace cuda = sageattn::cuda;

// By name, as GPUs of one arch differ by a factor.
struct KnownGpu {
  const char* name;
  Rates rates;
};
constexpr KnownGpu kKnownGpus[] = {
    {"NVIDIA H200",
     {1930, 1750, 4.15e12,
      "measured on an H200: a loop of nothing but wgmma, and a copy of large buffers"}},
};

// Null if there is no such line.
Json line_after(const char* path, const std::string& prefix) {
  std::ifstream file(path);
  for (std::string line; std::getline(file, line);) {
    if (line.starts_with(prefix)) return line.substr(prefix.size());
  }
  return nullptr;
}

// A line of the report, without the remark behind it.
std::string first_of(const Json& report, const char* key, const char* remark) {
  const std::string text = report.value(key, "");
  return text.substr(0, text.find(remark));
}

int attribute(const cuda::DeviceInfo& device, cuda::DeviceAttribute which) {
  int value = 0;
  const cuda::Driver& api = cuda::driver();
  guarded([&] {
    cuda::check(api, api.DeviceGetAttribute(&value, which, device.handle),
                "cuDeviceGetAttribute(%d)", which);
  });
  return value;
}

Machine gpu(const Json& report, int32_t ordinal) {
  const cuda::DeviceInfo& device =
      guarded([&]() -> const cuda::DeviceInfo& { return cuda::open_device(ordinal); });
  Machine machine;
  machine.l2_bytes = attribute(device, cuda::kDeviceL2CacheSize);
  const int version = cuda::driver().version;
  machine.json = {
      {"backend", "cuda"},
      {"name", device.name},
      {"compute_capability", device.capability},
      {"multiprocessors", device.multiprocessors},
      // The highest: the driver API does not tell the present one.
      {"max_sm_clock_mhz", attribute(device, cuda::kDeviceClockRate) / 1000},
      {"l2_bytes", machine.l2_bytes},
      {"driver", line_after("/sys/module/nvidia/version", "")},
      {"cuda", std::to_string(version / 1000) + "." + std::to_string(version % 1000 / 10)},
      {"nvrtc", first_of(report, "nvrtc", ", ")},  // without its path
  };
  for (const KnownGpu& known : kKnownGpus) {
    if (std::string(device.name) == known.name) machine.rates = known.rates;
  }
  return machine;
}

Machine cpu(const Json& report) {
  Machine machine;
  machine.json = {
      {"backend", "cpu"},
      {"name", line_after("/proc/cpuinfo", "model name\t: ")},
      {"emulated_arch", first_of(report, "arch", " (")},
      {"instruction_set", report.value("instruction_set", "")},
      {"threads", first_of(report, "threads", " (")},
  };
  return machine;
}

std::optional<double> qk_rate(const Rates& rates, int32_t format) {
  // The GPUs above have no INT4: its codes are multiplied as INT8.
  if (format == SAGEATTN_QK_I8 || format == SAGEATTN_QK_I4) return rates.s8_tops;
  return {};
}

std::optional<double> pv_rate(const Rates& rates, int32_t format) {
  if (format == SAGEATTN_PV_E4M3) return rates.e4m3_tops;
  return {};
}

}  // namespace

Machine find_machine(const Context& context) {
  const Json report = report_json(context);
  const bool on_gpu = report.value("backend", "").starts_with("CUDA");
  Machine machine = on_gpu ? gpu(report, context.device()) : cpu(report);
  machine.json["rates"] = nullptr;
  if (machine.rates) {
    machine.json["rates"] = {{"s8_tops", machine.rates->s8_tops},
                             {"e4m3_tops", machine.rates->e4m3_tops},
                             {"copy_bytes_per_second", machine.rates->copy_bytes},
                             {"source", machine.rates->source}};
  }
  return machine;
}

std::optional<double> tensor_peak(const Machine& machine, const sageattn_plan_info& plan) {
  if (!machine.rates) return {};
  const auto qk = qk_rate(*machine.rates, plan.qk_format);
  const auto pv = pv_rate(*machine.rates, plan.pv_format);
  if (!qk || !pv) return {};
  return 2 / (1 / *qk + 1 / *pv);  // half of the operations each
}

}  // namespace sageattn_cli
