// sageattn assess: which precision suits the Q, K and V of files.
#include <algorithm>
#include <cmath>
#include <iostream>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "activations.h"
#include "assess.h"
#include "assess_html.h"
#include "attention.h"
#include "commands.h"
#include "library.h"
#include "progress.h"
#include "table.h"
#include "tensor_io.h"

namespace sageattn_cli {
namespace {

constexpr Enumerant kMaskNames[] = {{"none", SAGEATTN_MASK_NONE},
                                    {"causal", SAGEATTN_MASK_CAUSAL_BOTTOM_RIGHT}};

struct AssessFlags {
  std::string file;
  std::string q, k, v;
  std::vector<std::string> layers;
  std::optional<int32_t> layout, mask;
  std::optional<float> sm_scale;
  std::optional<double> target_error, target_cos;
  int32_t rows = 64;
  bool bf16 = false;
  std::string json, html;
  ContextFlags context;
};

constexpr const char* kFooter =
    "FILE holds tensors NAME.q, NAME.k and NAME.v for each layer NAME, as examples/data does, and\n"
    "its metadata may say layout, mask and sm_scale; flags go before. Or one layer is given by "
    "--q,\n"
    "--k and --v, as in `run`. Errors are measured against EXACT on the same backend. For each "
    "head\n"
    "the first of sage2_4b, sage2_8b, sage1 and exact that meets the target is recommended, for a\n"
    "layer what its most demanding head needs. docs/assess.md says what each number means.";

// ---- Input -------------------------------------------------------------------------------------

// Where a layer's tensors are.
struct Source {
  std::string name;
  std::string q, k, v;
};

struct Sources {
  std::string title;
  std::vector<Source> layers;
  int32_t layout, mask;
  std::optional<float> sm_scale;
};

void require_one_kind(const AssessFlags& flags) {
  const bool any = !flags.q.empty() || !flags.k.empty() || !flags.v.empty();
  const bool all = !flags.q.empty() && !flags.k.empty() && !flags.v.empty();
  if (flags.file.empty() && !all) {
    throw CLI::ValidationError("give FILE, or all of --q, --k and --v");
  }
  if (!flags.file.empty() && any) {
    throw CLI::ValidationError("FILE", "goes without --q, --k and --v");
  }
  if (flags.file.empty() && !flags.layers.empty()) {
    throw CLI::ValidationError("--layers", "needs FILE, whose layers it chooses");
  }
  if (!flags.file.empty() && !flags.file.ends_with(".safetensors")) {
    throw CLI::ValidationError("FILE", "'" + flags.file +
                                           "' is not a .safetensors file; name .npy "
                                           "files with --q, --k and --v");
  }
}

[[noreturn]] void fail_for_lack_of(const std::string& missing, const std::string& name,
                                   const std::string& path) {
  throw Failure(kFileError, path + ": holds '" + name + "' but no '" + missing + "'");
}

// A layer that lacks a tensor is an error here: it would go missing from the report unseen.
void require_complete(const SafetensorsFile& file, const std::string& path) {
  for (const std::string& name : file.names()) {
    for (const char* part : {".q", ".k", ".v"}) {
      if (!name.ends_with(part)) continue;
      const std::string layer = name.substr(0, name.size() - 2);
      for (const char* other : {".q", ".k", ".v"}) {
        if (!file.contains(layer + other)) fail_for_lack_of(layer + other, name, path);
      }
    }
  }
}

std::vector<std::string> chosen_layers(const AssessFlags& flags, const SafetensorsFile& file) {
  std::vector<std::string> known = layers_of(file);
  if (known.empty()) {
    throw Failure(kFileError, flags.file + ": holds no tensors NAME.q, NAME.k, NAME.v");
  }
  if (flags.layers.empty()) return known;
  std::string names = "it holds:";
  for (const std::string& name : known) names += " " + name;
  const auto unknown =
      std::find_if(flags.layers.begin(), flags.layers.end(), [&](const std::string& layer) {
        return std::find(known.begin(), known.end(), layer) == known.end();
      });
  if (unknown != flags.layers.end()) {
    throw Failure(kFileError, flags.file + ": holds no layer '" + *unknown + "'; " + names);
  }
  return flags.layers;
}

Sources sources_of(const AssessFlags& flags) {
  require_one_kind(flags);
  Sources sources{"",
                  {},
                  flags.layout.value_or(SAGEATTN_LAYOUT_NHD),
                  flags.mask.value_or(SAGEATTN_MASK_NONE),
                  flags.sm_scale};
  if (flags.file.empty()) {
    sources.title = "q, k, v";
    sources.layers.push_back({"layer", flags.q, flags.k, flags.v});
    return sources;
  }
  const SafetensorsFile file(flags.file);
  require_complete(file, flags.file);
  for (const std::string& layer : chosen_layers(flags, file)) {
    const std::string prefix = flags.file + ":" + layer;
    sources.layers.push_back({layer, prefix + ".q", prefix + ".k", prefix + ".v"});
  }
  const auto& metadata = file.metadata();
  if (!flags.layout && metadata.count("layout")) sources.layout = metadata_layout(file, flags.file);
  if (!flags.mask && metadata.count("mask")) sources.mask = metadata_mask(file, flags.file);
  if (!flags.sm_scale && metadata.count("sm_scale")) {
    sources.sm_scale = metadata_scale(file, flags.file);
  }
  sources.title =
      metadata.count("model") ? metadata.at("model") : flags.file.substr(flags.file.rfind('/') + 1);
  return sources;
}

sageattn_const_tensor tensor_of(const Tensor& tensor, const View& view) {
  return {tensor.data.data(), view.stride_batch, view.stride_token, view.stride_head, 1};
}

// Points into `tensors`.
AssessInput input_of(const Source& source, const Sources& all, const AttentionInputs& tensors) {
  try {
    check_shapes(tensors, all.layout);
  } catch (const Failure& failure) {
    throw Failure(failure.code(), source.name + ": " + failure.what());
  }
  for (const Tensor* tensor : {&tensors.q, &tensors.k, &tensors.v}) {
    if (tensor->count() > 0) continue;
    throw Failure(kFileError, source.name + ": there is nothing to assess in a tensor of shape " +
                                  to_string(tensor->shape));
  }
  const View q = view_of(tensors.q, all.layout, "q");
  const View k = view_of(tensors.k, all.layout, "k");
  const View v = view_of(tensors.v, all.layout, "v");
  AssessInput input{};
  input.q_dtype = dtype_of(tensors.q.type);
  input.kv_dtype = dtype_of(tensors.k.type);
  input.batch = static_cast<int32_t>(q.batches);
  input.qo_len = static_cast<int32_t>(q.tokens);
  input.kv_len = static_cast<int32_t>(k.tokens);
  input.num_qo_heads = static_cast<int32_t>(q.heads);
  input.num_kv_heads = static_cast<int32_t>(k.heads);
  input.head_dim = static_cast<int32_t>(q.channels);
  input.head_dim_v = static_cast<int32_t>(v.channels);
  input.mask = all.mask;
  input.sm_scale = all.sm_scale.value_or(1 / std::sqrt(static_cast<float>(input.head_dim)));
  input.q = tensor_of(tensors.q, q);
  input.k = tensor_of(tensors.k, k);
  input.v = tensor_of(tensors.v, v);
  return input;
}

AssessTarget target_of(const AssessFlags& flags) {
  AssessTarget target;
  if (flags.target_error) {
    target.max_rel_error = *flags.target_error;
    if (!(target.max_rel_error > 0 && target.max_rel_error < 1)) {
      throw CLI::ValidationError("--target-error",
                                 fixed(target.max_rel_error, 6) + " is not above 0 and below 1");
    }
  }
  if (flags.target_cos) {
    target.min_cos_sim = *flags.target_cos;
    if (!(target.min_cos_sim > 0 && target.min_cos_sim < 1)) {
      throw CLI::ValidationError("--target-cos",
                                 fixed(target.min_cos_sim, 6) + " is not above 0 and below 1");
    }
    // The limit of CosSim alone, unless both are given.
    if (!flags.target_error) target.max_rel_error = HUGE_VAL;
  }
  return target;
}

std::vector<AssessedLayer> assess_all(const AssessFlags& flags, const Sources& sources,
                                      const AssessTarget& target) {
  const Context context(flags.context.desc());
  Progress progress(static_cast<int64_t>(sources.layers.size() * (assess_variants().size() + 1)));
  std::vector<AssessedLayer> layers;
  for (const Source& source : sources.layers) {
    AttentionInputs tensors;
    tensors.q = read_operand(source.q, flags.bf16);
    tensors.k = read_operand(source.k, flags.bf16);
    tensors.v = read_operand(source.v, flags.bf16);
    const AssessInput input = input_of(source, sources, tensors);
    layers.push_back(
        {source.name, assess(context, input, target, flags.rows, [&] { progress.advance(); })});
  }
  return layers;
}

Recommendation overall_of(const std::vector<AssessedLayer>& layers, const AssessTarget& target) {
  std::vector<const HeadAssessment*> heads;
  for (const AssessedLayer& layer : layers) {
    for (const HeadAssessment& head : layer.result.heads) heads.push_back(&head);
  }
  return recommend(heads, target);
}

// ---- Output ------------------------------------------------------------------------------------

Json json_of(const ValueStats& stats) {
  return {{"min", stats.min},
          {"max", stats.max},
          {"absmax", stats.absmax},
          {"mean_over_std", stats.mean_over_std},
          {"mean_share", stats.mean_share},
          {"channel_ratio", stats.channel_ratio},
          {"nonfinite", stats.nonfinite}};
}

// Of `run` and `bench`.
std::string flags_of(const Recommendation& recommendation) {
  const bool off = smooths_v(recommendation.preset) && !recommendation.smooth_v;
  return "--preset " + name_of(kPresets, recommendation.preset) + (off ? " --smooth-v off" : "");
}

Json json_of(const Recommendation& recommendation) {
  return {{"preset", name_of(kPresets, recommendation.preset)},
          {"smooth_v", recommendation.smooth_v},
          {"flags", flags_of(recommendation)},
          {"reason", recommendation.reason}};
}

Json json_of(const std::vector<VariantResult>& results) {
  Json json = Json::array();
  for (size_t i = 0; i < results.size(); ++i) {
    const AssessVariant& variant = assess_variants()[i];
    Json one = {{"preset", name_of(kPresets, variant.preset)},
                {"smooth_v", variant.smooth_v_off ? "off" : "auto"}};
    if (results[i].unsupported.empty()) {
      one["predicted_error"] = results[i].predicted;
      one["rel_error"] = results[i].rel_error;
      one["cos_sim"] = results[i].cos_sim;
      one["nonfinite"] = results[i].nonfinite;
    } else {
      one["error"] = results[i].unsupported;
    }
    json.push_back(std::move(one));
  }
  return json;
}

Json json_of(const HeadAssessment& head) {
  return {{"batch", head.batch},
          {"head", head.head},
          {"kv_head", head.kv_head},
          {"q", json_of(head.q)},
          {"q_smoothed", json_of(head.q_smoothed)},
          {"k", json_of(head.k)},
          {"k_smoothed", json_of(head.k_smoothed)},
          {"v", json_of(head.v)},
          {"softmax",
           {{"max_probability", head.softmax.max_probability},
            {"effective_keys", head.softmax.effective_keys},
            {"visible_keys", head.softmax.visible_keys}}},
          {"presets", json_of(head.variants)},
          {"recommendation", json_of(head.recommendation)}};
}

Json json_of(const AssessedLayer& layer) {
  Json heads = Json::array(), keys = Json::array();
  for (const HeadAssessment& head : layer.result.heads) heads.push_back(json_of(head));
  for (const KeyDistribution& one : layer.result.keys) {
    keys.push_back({{"batch", one.batch},
                    {"kv_head", one.kv_head},
                    {"min", one.bins.min},
                    {"max", one.bins.max},
                    {"before", one.before},
                    {"after", one.after}});
  }
  return {{"name", layer.name},
          {"presets", json_of(layer.result.variants)},
          {"recommendation", json_of(layer.result.recommendation)},
          {"heads", std::move(heads)},
          {"k_histograms", std::move(keys)}};
}

std::string percent(const VariantResult& result) {
  if (!result.unsupported.empty()) return "-";
  return result.nonfinite > 0 ? "NaN" : fixed(100 * result.rel_error, 2);
}

std::string percents(const VariantResult& result) {
  if (!result.unsupported.empty()) return "-";
  return percent(result) + " (" + fixed(100 * result.predicted, 2) + ")";
}

void print_heads(const std::vector<AssessedLayer>& layers) {
  constexpr auto kLeft = Table::Align::kLeft;
  Table table({{"layer", kLeft},
               {"head", kLeft},
               {"|q|"},
               {"|k|"},
               {"|v|"},
               {"k mean/std"},
               {"k share"},
               {"v mean/std"},
               {"max p"},
               {"eff. keys"},
               {"4b %"},
               {"8b %"},
               {"sage1 %"},
               {"recommended", kLeft}});
  for (const AssessedLayer& layer : layers) {
    for (const HeadAssessment& head : layer.result.heads) {
      const std::string batch = head.batch > 0 ? std::to_string(head.batch) + ":" : "";
      table.add_row({layer.name, batch + std::to_string(head.head), fixed(head.q.absmax, 2),
                     fixed(head.k.absmax, 2), fixed(head.v.absmax, 2),
                     fixed(head.k.mean_over_std, 1), fixed(head.k.mean_share, 2),
                     fixed(head.v.mean_over_std, 1), fixed(head.softmax.max_probability, 2),
                     fixed(head.softmax.effective_keys, 1), percents(head.variants[0]),
                     percents(head.variants[1]), percents(head.variants[3]),
                     text_of(head.recommendation)});
    }
  }
  std::cout << "Relative error against EXACT, float32 output, in %, and in parentheses what was "
               "predicted.\n\n";
  table.print(std::cout);
}

void print_layers(const std::vector<AssessedLayer>& layers) {
  std::vector<Table::Column> columns = {{"layer", Table::Align::kLeft}};
  for (const AssessVariant& variant : assess_variants()) columns.push_back({variant.name});
  columns.push_back({"recommended", Table::Align::kLeft});
  Table table(columns);
  for (const AssessedLayer& layer : layers) {
    std::vector<std::string> cells = {layer.name};
    for (const VariantResult& result : layer.result.variants) cells.push_back(percent(result));
    cells.push_back(text_of(layer.result.recommendation) + " (" +
                    layer.result.recommendation.reason + ")");
    table.add_row(cells);
  }
  std::cout << "\nAll heads of a layer together, in %:\n\n";
  table.print(std::cout);
}

void print_summary(const std::vector<AssessedLayer>& layers, const AssessTarget& target,
                   const Recommendation& overall) {
  std::vector<std::pair<std::string, int>> counts;
  for (const AssessedLayer& layer : layers) {
    for (const HeadAssessment& head : layer.result.heads) {
      const std::string text = text_of(head.recommendation);
      auto found = std::find_if(counts.begin(), counts.end(),
                                [&](const auto& count) { return count.first == text; });
      if (found == counts.end()) found = counts.insert(found, {text, 0});
      ++found->second;
    }
  }
  std::cout << "\nFor " << text_of(target) << " in every head:\n";
  for (const auto& [text, count] : counts) std::cout << "  " << count << " heads: " << text << '\n';
  std::cout << "  all with one plan: " << text_of(overall) << " (" << overall.reason
            << "): " << flags_of(overall) << '\n';
}

void write_text(const std::string& path, const std::string& text) {
  if (path.empty()) return;
  const auto bytes = std::as_bytes(std::span(text));
  write_file(path, {bytes.begin(), bytes.end()});
}

ExitCode run_assess(const AssessFlags& flags) {
  const AssessTarget target = target_of(flags);
  for (const std::string& path : {flags.json, flags.html}) {
    if (!path.empty()) check_writable(path);
  }
  const Sources sources = sources_of(flags);
  const std::vector<AssessedLayer> layers = assess_all(flags, sources, target);
  const Recommendation overall = overall_of(layers, target);
  print_heads(layers);
  print_layers(layers);
  print_summary(layers, target, overall);
  if (!flags.json.empty()) {
    Json json = {
        {"version", sageattn_version_string()},
        {"source_id", sageattn_source_id()},
        {"title", sources.title},
        {"mask", name_of(kMaskNames, sources.mask)},
        {"target", {{"max_rel_error", target.max_rel_error}, {"min_cos_sim", target.min_cos_sim}}},
        {"recommendation", json_of(overall)},
        {"layers", Json::array()}};
    for (const AssessedLayer& layer : layers) json["layers"].push_back(json_of(layer));
    write_text(flags.json, json.dump(1, ' ', false, Json::error_handler_t::replace) + "\n");
  }
  if (!flags.html.empty()) {
    write_text(flags.html, assess_html(sources.title, layers, target, overall));
  }
  return kOk;
}

}  // namespace

Command add_assess(CLI::App& program) {
  CLI::App* app =
      program.add_subcommand("assess", "Choose a precision for the Q, K and V of files");
  const auto flags = std::make_shared<AssessFlags>();
  add_footer(*app, kFooter);
  app->add_option("FILE", flags->file, "Activations of one or more layers (.safetensors)");
  app->add_option("--q", flags->q, "Queries of one layer")->type_name("FILE");
  app->add_option("--k", flags->k, "Keys")->type_name("FILE");
  app->add_option("--v", flags->v, "Values")->type_name("FILE");
  app->add_option("--layers", flags->layers, "Layers of FILE (default: all)")
      ->delimiter(',')
      ->type_name("NAME");
  app->add_option("--target-error", flags->target_error,
                  "Largest relative error of a head (default: 0.05, or any with --target-cos)")
      ->type_name("FLOAT");
  app->add_option("--target-cos", flags->target_cos, "Smallest CosSim of a head (default: any)")
      ->type_name("FLOAT");
  add_enumerant_flag(*app, "--layout", "Order of tokens (N) and heads (H)", kLayouts,
                     [flags](int32_t value) { flags->layout = value; });
  add_enumerant_flag(*app, "--mask", "Which keys a query sees", kMaskNames,
                     [flags](int32_t value) { flags->mask = value; });
  app->add_option("--sm-scale", flags->sm_scale, "Factor of Q K^T (default: 1 / sqrt(head_dim))")
      ->type_name("FLOAT");
  app->add_option("--rows", flags->rows, "Queries a head whose softmax is looked at (default: 64)")
      ->check(CLI::Range(1, 1 << 20).description(""))
      ->type_name("1.." + std::to_string(1 << 20));
  app->add_flag("--bf16", flags->bf16, "Read uint16 as bfloat16");
  flags->context.backend = SAGEATTN_BACKEND_CPU;
  flags->context.add_to(*app);
  app->add_option("--json", flags->json, "Everything, as JSON")->type_name("FILE");
  app->add_option("--html", flags->html, "A page with heat maps and distributions")
      ->type_name("FILE");
  return {app, [flags] { return run_assess(*flags); }};
}

}  // namespace sageattn_cli
