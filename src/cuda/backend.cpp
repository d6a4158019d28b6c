#include "src/cuda/backend.h"

#include <algorithm>
#include <cstdio>

#include "include/sageattn.h"
#include "src/cuda/module.h"
#include "src/cuda/pointers.h"

namespace sageattn::cuda {
namespace {

sageattn_kernel_info info_of(const KernelUse& use, const jit::KernelImage& image) {
  sageattn_kernel_info info{};
  info.struct_size = sizeof info;
  info.origin = image.origin;
  info.registers = image.code->registers;
  info.spill_bytes = image.code->spill_bytes;
  info.smem_bytes = image.code->smem_bytes + use.shared_bytes;
  info.threads = use.threads;
  info.compile_ms = image.compile_ms;
  std::string macros;
  for (const jit::Macro& macro :
       jit::resolve_macros(jit::find_kernel(jit::kernel_list(), use.name), use.macros)) {
    macros += (macros.empty() ? "" : " ") + macro.name + "=" + std::to_string(macro.value);
  }
  std::snprintf(info.name, sizeof info.name, "%s", use.name.c_str());
  std::snprintf(info.macros, sizeof info.macros, "%s", macros.c_str());
  return info;
}

}  // namespace

Target find_target(int32_t ordinal, int32_t target_arch) {
  Target target{};
  if (target_arch == 0) {
    target.device = &open_device(ordinal);
    target.arch = target.device->choice.arch;
    target.binary = target.device->choice.binary;
    return target;
  }
  target.arch = target.binary = target_arch;
  try {
    const DeviceInfo& device = open_device(ordinal);
    if (runs_on(target_arch, device.capability)) {
      target.device = &device;
    } else {
      target.no_device.status = SAGEATTN_E_UNSUPPORTED;
      std::snprintf(target.no_device.message, sizeof target.no_device.message,
                    "target_arch = %d: its kernels do not run on device %d, %s (sm_%d); leave it 0 "
                    "to execute there",
                    target_arch, ordinal, device.name, device.capability);
    }
  } catch (const Error& error) {
    target.no_device = error;
  }
  return target;
}

std::string describe(const Target& target) {
  const auto text = [](auto number) { return std::to_string(number); };
  std::string lines;
  bool known = true;
  if (const DeviceInfo* device = target.device) {
    const int version = driver().version;
    lines += "device: " + text(device->ordinal) + ", " + device->name + ", sm_" +
             text(device->capability) + ", " + text(device->multiprocessors) +
             " multiprocessors, " + text(device->max_shared_bytes) +
             " bytes of shared memory a block\n";
    lines += "driver: CUDA " + text(version / 1000) + "." + text(version % 1000 / 10) + "\n";
    known = device->choice.known || target.binary != device->choice.binary;
  } else {
    lines +=
        std::string("device: none, plans cannot be executed: ") + target.no_device.message + "\n";
  }
  lines += "arch: " + text(target.arch) + " (kernels compiled for sm_" + text(target.binary);
  if (!known) lines += ", which is newer than this library";
  return lines + ")\n";
}

Program::Program(const PlanConfig& plan, const Target& target, jit::KernelStore& store)
    : target_(target) {
  std::vector<KernelUse> uses = kernels_of(plan);
  // Compiling starts with attention, which runs last and takes longest.
  std::reverse(uses.begin(), uses.end());
  std::vector<jit::KernelRequest> requests;
  requests.reserve(uses.size());
  for (const KernelUse& use : uses) requests.push_back({use.name, target.binary, use.macros});
  images_ = store.get_all(requests);
  infos_.resize(uses.size());
  for (size_t i = 0; i < uses.size(); ++i) {
    const KernelUse& use = uses[i];
    const std::shared_ptr<const jit::KernelImage>& image = images_[i];
    Loaded& kernel = kernels_[static_cast<int>(use.kernel)];
    kernel.name = use.name;
    kernel.threads = use.threads;
    kernel.shared_bytes = use.shared_bytes;
    kernel.stays = use.stays;
    sageattn_kernel_info& info = infos_[uses.size() - 1 - i] = info_of(use, *image);
    info.arch = target.binary;
    if (target.device != nullptr) {
      const Driver& api = driver();
      const CurrentContext current(api, *target.device);
      const LoadedKernel loaded = load_kernel(api, *target.device, image->code->cubin,
                                              image->entry.c_str(), use.threads, use.shared_bytes);
      kernel.function = loaded.function;
      info.registers = loaded.registers;  // the log may lack them
    }
  }
}

void Program::launch(const PlanConfig& plan, const Launch& launch, Stream stream,
                     Observer* observer) const {
  if (target_.device == nullptr) throw target_.no_device;
  class Enqueue final : public Sink {
   public:
    Enqueue(const Program& program, Stream stream, Observer* observer)
        : program_(program),
          stream_(stream),
          observer_(observer),
          // An observer sees kernels one by one.
          overlap_(observer == nullptr &&
                   has_dependents(program.target_.device->capability, api_.version)) {}

    void launch(Kernel kernel, int64_t blocks, const void* params) override {
      const Loaded& loaded = program_.kernels_[static_cast<int>(kernel)];
      LaunchConfig config{};
      if (loaded.stays)
        blocks = std::min<int64_t>(blocks, program_.target_.device->multiprocessors);
      config.grid_x = static_cast<unsigned>(blocks);
      config.grid_y = config.grid_z = config.block_y = config.block_z = 1;
      config.block_x = static_cast<unsigned>(loaded.threads);
      config.shared_bytes = static_cast<unsigned>(loaded.shared_bytes);
      config.stream = stream_;
      // The first waits for whatever the caller has in the stream.
      LaunchAttribute dependent{kLaunchProgrammaticSerialization, {}, {1}};
      if (overlap_ && !first_) {
        config.attributes = &dependent;
        config.num_attributes = 1;
      }
      first_ = false;
      void* parameters[] = {const_cast<void*>(params)};  // the driver copies them
      if (observer_ != nullptr) observer_->before(loaded.name, blocks);
      const Result result = api_.LaunchKernelEx(&config, loaded.function, parameters, nullptr);
      if (result == kErrorInvalidHandle) {  // the function is ours
        fail(SAGEATTN_E_INVALID_ARGUMENT,
             "stream = %p: must be a stream of the primary context of device %d, which the plan is "
             "for",
             static_cast<void*>(stream_), program_.target_.device->ordinal);
      }
      check(api_, result, "cuLaunchKernelEx(%s, %lld blocks)", loaded.name.c_str(),
            static_cast<long long>(blocks));
      if (observer_ != nullptr) observer_->after();
    }

   private:
    const Driver& api_ = driver();
    const Program& program_;
    Stream stream_;
    Observer* observer_;
    bool overlap_;
    bool first_ = true;
  };

  const CurrentContext current(driver(), *target_.device);
  check_on_device(driver(), *target_.device, launch.operands);
  Enqueue enqueue(*this, stream, observer);
  enumerate_launches(plan, launch, enqueue);
}

}  // namespace sageattn::cuda
