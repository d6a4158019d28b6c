#include "options.h"

#include <algorithm>
#include <cctype>
#include <iterator>
#include <sstream>

#include "library.h"

namespace sageattn_cli {
namespace {

using Desc = sageattn_attn_desc;
using Info = sageattn_plan_info;

constexpr Enumerant kPresetNames[] = {
    {"auto", SAGEATTN_PRESET_AUTO},         {"sage1", SAGEATTN_PRESET_SAGE1},
    {"sage2_8b", SAGEATTN_PRESET_SAGE2_8B}, {"sage2_4b", SAGEATTN_PRESET_SAGE2_4B},
    {"sage2pp", SAGEATTN_PRESET_SAGE2PP},   {"exact", SAGEATTN_PRESET_EXACT},
};
constexpr Enumerant kBackendNames[] = {
    {"auto", SAGEATTN_BACKEND_AUTO},
    {"cuda", SAGEATTN_BACKEND_CUDA},
    {"cpu", SAGEATTN_BACKEND_CPU},
};
constexpr Enumerant kDtypeNames[] = {
    {"f16", SAGEATTN_F16}, {"bf16", SAGEATTN_BF16}, {"f32", SAGEATTN_F32}};
constexpr Enumerant kLayoutNames[] = {{"nhd", SAGEATTN_LAYOUT_NHD}, {"hnd", SAGEATTN_LAYOUT_HND}};
constexpr Enumerant kMasks[] = {
    {"none", SAGEATTN_MASK_NONE},
    {"causal_bottom_right", SAGEATTN_MASK_CAUSAL_BOTTOM_RIGHT},
    {"causal_top_left", SAGEATTN_MASK_CAUSAL_TOP_LEFT},
    {"window", SAGEATTN_MASK_WINDOW},
};
constexpr Enumerant kQkFormats[] = {
    {"auto", SAGEATTN_QK_AUTO}, {"i8", SAGEATTN_QK_I8},     {"i4", SAGEATTN_QK_I4},
    {"none", SAGEATTN_QK_NONE}, {"e4m3", SAGEATTN_QK_E4M3},
};
constexpr Enumerant kGranularities[] = {
    {"auto", SAGEATTN_GRANULARITY_AUTO},           {"per_thread", SAGEATTN_GRANULARITY_PER_THREAD},
    {"per_warp", SAGEATTN_GRANULARITY_PER_WARP},   {"per_block", SAGEATTN_GRANULARITY_PER_BLOCK},
    {"per_token", SAGEATTN_GRANULARITY_PER_TOKEN}, {"per_tensor", SAGEATTN_GRANULARITY_PER_TENSOR},
};
constexpr Enumerant kSmooth[] = {
    {"auto", SAGEATTN_SMOOTH_AUTO}, {"on", SAGEATTN_SMOOTH_ON}, {"off", SAGEATTN_SMOOTH_OFF}};
constexpr Enumerant kSmoothV[] = {
    {"auto", SAGEATTN_SMOOTH_V_AUTO},
    {"off", SAGEATTN_SMOOTH_V_OFF},
    {"sequence", SAGEATTN_SMOOTH_V_SEQUENCE},
    {"group", SAGEATTN_SMOOTH_V_GROUP},
};
constexpr Enumerant kVScales[] = {
    {"auto", SAGEATTN_V_SCALE_AUTO},
    {"channel", SAGEATTN_V_SCALE_CHANNEL},
    {"group", SAGEATTN_V_SCALE_GROUP},
};
constexpr Enumerant kRotations[] = {
    {"none", SAGEATTN_ROTATION_NONE},
    {"hadamard", SAGEATTN_ROTATION_HADAMARD},
    {"smoothattn", SAGEATTN_ROTATION_SMOOTHATTN},
};
constexpr Enumerant kPvFormats[] = {
    {"auto", SAGEATTN_PV_AUTO}, {"e4m3", SAGEATTN_PV_E4M3}, {"f16", SAGEATTN_PV_F16},
    {"none", SAGEATTN_PV_NONE}, {"e5m2", SAGEATTN_PV_E5M2}, {"i8", SAGEATTN_PV_I8},
};
constexpr Enumerant kRowSums[] = {
    {"auto", SAGEATTN_ROW_SUM_AUTO},
    {"p", SAGEATTN_ROW_SUM_P},
    {"rounded_p", SAGEATTN_ROW_SUM_ROUNDED_P},
};
constexpr Enumerant kPvAccums[] = {
    {"auto", SAGEATTN_PV_ACCUM_AUTO},
    {"two_level", SAGEATTN_PV_ACCUM_TWO_LEVEL},
    {"f16", SAGEATTN_PV_ACCUM_F16},
    {"f32", SAGEATTN_PV_ACCUM_F32},
    {"single_level", SAGEATTN_PV_ACCUM_SINGLE_LEVEL},
};
constexpr Enumerant kKernelNames[] = {
    {"auto", SAGEATTN_KERNEL_AUTO},
    {"mma_sync", SAGEATTN_KERNEL_MMA_SYNC},
    {"wgmma", SAGEATTN_KERNEL_WGMMA},
};
constexpr Enumerant kPvModels[] = {
    {"auto", SAGEATTN_PV_MODEL_AUTO},
    {"qmma13", SAGEATTN_PV_MODEL_QMMA13},
    {"hmma", SAGEATTN_PV_MODEL_HMMA},
};
constexpr Enumerant kOrigins[] = {
    {"builtin", SAGEATTN_ORIGIN_BUILTIN},   {"memory", SAGEATTN_ORIGIN_MEMORY},
    {"blob", SAGEATTN_ORIGIN_BLOB},         {"disk", SAGEATTN_ORIGIN_DISK},
    {"compiled", SAGEATTN_ORIGIN_COMPILED},
};

constexpr DescOption kDescOptions[] = {
    {"out_dtype", "Type of the output (default: that of Q)", kDtypeNames, &Desc::out_dtype,
     &Info::out_dtype},
    {"layout", "Order of tokens (N), heads (H), channels (D) in every tensor", kLayoutNames,
     &Desc::layout, nullptr},
    {"mask", "Which keys a query sees", kMasks, &Desc::mask, nullptr},
    {"window_left",
     "With --mask window: keys before the diagonal, -1 for all",
     {},
     &Desc::window_left,
     nullptr},
    {"window_right",
     "With --mask window: keys after the diagonal, -1 for all",
     {},
     &Desc::window_right,
     nullptr},
    {"qk_format", "Format of Q and K in Q K^T", kQkFormats, &Desc::qk_format, &Info::qk_format},
    {"qk_granularity", "Which elements of Q and K share a scale", kGranularities,
     &Desc::qk_granularity, &Info::qk_granularity},
    {"smooth_q", "Subtract the mean of each tile of queries", kSmooth, &Desc::smooth_q,
     &Info::smooth_q},
    {"smooth_k", "Subtract the mean of all keys", kSmooth, &Desc::smooth_k, &Info::smooth_k},
    {"smooth_v", "Subtract the mean of V and add it back to the output", kSmoothV, &Desc::smooth_v,
     &Info::smooth_v},
    {"v_scale", "Which elements of a channel of V share a scale", kVScales, &Desc::v_scale,
     &Info::v_scale},
    {"rotation", "Change of basis of Q and K before quantization", kRotations, &Desc::rotation,
     &Info::rotation},
    {"pv_format", "Format of P and V in P V", kPvFormats, &Desc::pv_format, &Info::pv_format},
    {"row_sum", "What the normalising row sum adds up", kRowSums, &Desc::row_sum, &Info::row_sum},
    {"pv_accum", "How the products P V are accumulated", kPvAccums, &Desc::pv_accum,
     &Info::pv_accum},
    {"promotion_interval",
     "Keys between promotions of the accumulator (0: automatic)",
     {},
     &Desc::promotion_interval,
     &Info::promotion_interval},
    {"kernel", "Kernel family", kKernelNames, &Desc::kernel, &Info::kernel},
    {"pv_model", "Model of FP8 accumulation", kPvModels, &Desc::pv_model, &Info::pv_model},
};

std::string flag_of(const DescOption& option) {
  std::string flag = std::string("--") + option.name;
  std::replace(flag.begin(), flag.end(), '_', '-');
  return flag;
}

std::string lower(std::string text) {
  std::transform(text.begin(), text.end(), text.begin(),
                 [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
  return text;
}

// A plan holds AUTO in the fields that play no part in it.
bool applies(const DescOption& option, int32_t value) {
  return option.enumerants.empty() || name_of(option.enumerants, value) != "auto";
}

Json value_json(const DescOption& option, int32_t value) {
  if (!applies(option, value)) return nullptr;
  if (option.enumerants.empty()) return value;
  return name_of(option.enumerants, value);
}

}  // namespace

const std::span<const Enumerant> kPresets = kPresetNames;
const std::span<const Enumerant> kLayouts = kLayoutNames;
const std::span<const Enumerant> kBackends = kBackendNames;
const std::span<const Enumerant> kDtypes = kDtypeNames;
const std::span<const Enumerant> kKernels = kKernelNames;

std::span<const DescOption> desc_options() { return kDescOptions; }

std::string name_of(std::span<const Enumerant> enumerants, int32_t value) {
  for (const Enumerant& enumerant : enumerants) {
    if (enumerant.value == value) return enumerant.name;
  }
  return std::to_string(value);
}

int32_t parse_enumerant(const std::string& flag, const std::string& text,
                        std::span<const Enumerant> enumerants) {
  for (const Enumerant& enumerant : enumerants) {
    if (lower(text) == enumerant.name) return enumerant.value;
  }
  throw CLI::ValidationError(
      flag, "unknown value '" + text + "'; it takes " + join_names(enumerants, ", "));
}

std::string join_names(std::span<const Enumerant> enumerants, const char* separator) {
  std::string names;
  for (const Enumerant& enumerant : enumerants) {
    names += (names.empty() ? "" : separator) + std::string(enumerant.name);
  }
  return names;
}

void add_enumerant_flag(CLI::App& app, const std::string& flag, const std::string& help,
                        std::span<const Enumerant> enumerants, std::function<void(int32_t)> set) {
  const auto parse = [flag, enumerants, set = std::move(set)](const std::string& text) {
    set(parse_enumerant(flag, text, enumerants));
  };
  app.add_option_function<std::string>(flag, parse, help)->type_name(join_names(enumerants, "|"));
}

std::vector<std::string> split_lists(const std::string& flag,
                                     const std::vector<std::string>& lists) {
  std::vector<std::string> elements;
  for (const std::string& list : lists) {
    for (size_t start = 0, end = 0; end != std::string::npos; start = end + 1) {
      end = list.find(',', start);
      elements.push_back(list.substr(start, end - start));
      if (elements.back().empty()) {
        throw CLI::ValidationError(flag, "'" + list + "' has an empty element");
      }
    }
  }
  return elements;
}

void add_enumerants_flag(CLI::App& app, const std::string& flag, const std::string& help,
                         std::span<const Enumerant> enumerants, std::vector<int32_t>& values) {
  const auto parse = [flag, enumerants, &values](const std::vector<std::string>& lists) {
    for (const std::string& name : split_lists(flag, lists)) {
      values.push_back(parse_enumerant(flag, name, enumerants));
    }
  };
  app.add_option_function<std::vector<std::string>>(flag, parse, help)
      ->type_name(join_names(enumerants, "|"));
}

void FieldFlags::add_to(CLI::App& app, const std::function<bool(const DescOption&)>& takes) {
  for (const DescOption& option : desc_options()) {
    if (!takes(option)) continue;
    const auto change = [this, &option](int32_t value) { changes_.emplace_back(&option, value); };
    if (option.enumerants.empty()) {
      app.add_option_function<int32_t>(flag_of(option), change, option.help)->type_name("INT");
    } else {
      add_enumerant_flag(app, flag_of(option), option.help, option.enumerants, change);
    }
  }
}

void FieldFlags::apply(sageattn_attn_desc& desc) const {
  for (const auto& [option, value] : changes_) desc.*option->desc_field = value;
}

Json FieldFlags::json() const {
  Json json = Json::object();
  for (const auto& [option, value] : changes_) {
    json[option->name] =
        option->enumerants.empty() ? Json(value) : Json(name_of(option->enumerants, value));
  }
  return json;
}

void DescFlags::add_to(CLI::App& app) {
  add_enumerant_flag(app, "--preset", "Named numerics that the flags below change", kPresets,
                     [this](int32_t value) { preset_ = value; });
  fields_.add_to(app, [](const DescOption&) { return true; });
  app.add_option("--sm-scale", sm_scale_, "Factor of Q K^T (default: 1 / sqrt(head_dim))")
      ->type_name("FLOAT");
}

sageattn_attn_desc DescFlags::desc() const {
  sageattn_attn_desc desc = preset_desc(preset_);
  fields_.apply(desc);
  if (sm_scale_) {
    desc.sm_scale_set = 1;
    desc.sm_scale = *sm_scale_;
  }
  return desc;
}

sageattn_attn_desc preset_desc(int32_t preset) {
  sageattn_attn_desc desc;
  check([&](sageattn_error* error) {
    return sageattn_attn_desc_init(&desc, sizeof desc, preset, error);
  });
  return desc;
}

void ContextFlags::add_to(CLI::App& app) {
  add_enumerant_flag(app, "--backend",
                     "Who computes (default: " + name_of(kBackends, backend) + ")", kBackends,
                     [this](int32_t value) { backend = value; });
  app.add_option("--device", device, "CUDA device, counted from 0")->type_name("INT");
  app.add_option("--arch", arch,
                 "GPU architecture to compile for or to emulate: 80, 86, 89, 90, 120")
      ->type_name("INT");
  app.add_option("--threads", threads, "Threads of the CPU backend (default: all)")
      ->type_name("INT");
}

sageattn_context_desc ContextFlags::desc() const {
  auto desc = sized<sageattn_context_desc>();
  desc.backend = backend;
  desc.device = device;
  desc.target_arch = arch;
  desc.num_threads = threads;
  return desc;
}

Json plan_json(const sageattn_plan_info& info) {
  Json json = {
      {"kernel_name", info.kernel_name},
      {"backend", name_of(kBackends, info.backend)},
      {"arch", info.arch},
      {"origin", name_of(kOrigins, info.origin)},
      {"min_workspace", info.min_workspace},
      {"preferred_workspace", info.preferred_workspace},
      {"b_q", info.b_q},
      {"b_k", info.b_k},
      {"q_dtype", name_of(kDtypeNames, info.q_dtype)},
      {"kv_dtype", name_of(kDtypeNames, info.kv_dtype)},
      {"sm_scale", info.sm_scale},
  };
  for (const DescOption& option : desc_options()) {
    if (option.info_field) json[option.name] = value_json(option, info.*option.info_field);
  }
  return json;
}

std::vector<std::pair<std::string, std::string>> plan_numerics(const sageattn_plan_info& info) {
  std::vector<std::pair<std::string, std::string>> numerics;
  for (const DescOption& option : desc_options()) {
    if (!option.info_field) continue;
    const int32_t value = info.*option.info_field;
    numerics.emplace_back(option.name,
                          applies(option, value) ? name_of(option.enumerants, value) : "-");
  }
  return numerics;
}

Json report_json(const Context& context) {
  constexpr const char* kSeparator = ": ";
  Json json = Json::object();
  std::istringstream lines(context.report());
  for (std::string line; std::getline(lines, line);) {
    const size_t separator = line.find(kSeparator);
    if (separator == std::string::npos) continue;
    Json& value = json[line.substr(0, separator)];
    const std::string text = line.substr(separator + 2);
    if (value.is_null()) {
      value = text;
    } else {  // one of several: a list
      if (!value.is_array()) value = Json::array({value});
      value.push_back(text);
    }
  }
  return json;
}

}  // namespace sageattn_cli
