// sageattn demo: the error of each preset on activations of real models.
#include <algorithm>
#include <cctype>
#include <filesystem>
#include <iostream>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "activations.h"
#include "attention.h"
#include "commands.h"
#include "demo_presets.h"
#include "library.h"
#include "progress.h"
#include "table.h"
#include "tensor_io.h"

namespace sageattn_cli {
namespace {

namespace fs = std::filesystem;

constexpr const char* kSuffix = ".safetensors";
// A build tree's program lies a few folders below the sources.
constexpr int kFoldersUp = 5;

struct DemoFlags {
  std::string data;
  std::vector<std::string> files;
  std::vector<int32_t> presets;  // indices
  int32_t threads = 0;
  bool json = false;
};

struct Case {
  std::string name;  // of the file, without its suffix
  std::string layer;
  int32_t layout, mask;
  float sm_scale;
  AttentionInputs inputs;
};

struct Row {
  std::string name, layer;
  const char* preset;
  sageattn_compare_result error;
  double milliseconds, exact_milliseconds;
};

// ---- Data --------------------------------------------------------------------------------------

std::vector<fs::path> safetensors_in(const fs::path& folder) {
  std::vector<fs::path> files;
  std::error_code ignored;  // a folder that cannot be listed holds nothing
  for (const auto& entry : fs::directory_iterator(folder, ignored)) {
    if (entry.path().extension() == kSuffix) files.push_back(entry.path());
  }
  std::sort(files.begin(), files.end());
  return files;
}

// Where the data lies in a source tree, and in an installed one.
std::vector<fs::path> default_folders() {
  std::vector<fs::path> folders = {fs::path("examples") / "data"};
  std::error_code error;
  fs::path folder = fs::read_symlink("/proc/self/exe", error).parent_path();
  for (int i = 0; i < kFoldersUp && !folder.empty(); ++i, folder = folder.parent_path()) {
    folders.push_back(folder / "examples" / "data");
    folders.push_back(folder / "share" / "sageattn" / "data");
  }
  return folders;
}

fs::path data_folder(const DemoFlags& flags) {
  if (!flags.data.empty()) return flags.data;
  std::string tried;
  for (const fs::path& folder : default_folders()) {
    if (!safetensors_in(folder).empty()) return folder;
    tried += "\n  " + folder.string();
  }
  throw Failure(kFileError, "no activations found; name their folder with --data. Tried:" + tried);
}

std::vector<fs::path> data_files(const DemoFlags& flags) {
  const fs::path folder = data_folder(flags);
  std::vector<fs::path> files;
  for (const std::string& name : flags.files) {
    fs::path path = folder / name;
    if (path.extension() != kSuffix) path += kSuffix;
    files.push_back(std::move(path));
  }
  if (files.empty()) files = safetensors_in(folder);
  if (files.empty()) throw Failure(kFileError, folder.string() + ": holds no .safetensors file");
  return files;
}

void append_cases(const fs::path& path, std::vector<Case>& cases) {
  const SafetensorsFile file(path);
  for (const std::string& layer : layers_of(file)) {
    Case added{};
    added.name = path.stem();
    added.layer = layer;
    added.layout = metadata_layout(file, path);
    added.mask = metadata_mask(file, path);
    added.sm_scale = metadata_scale(file, path);
    added.inputs.q = file.read(layer + ".q");
    added.inputs.k = file.read(layer + ".k");
    added.inputs.v = file.read(layer + ".v");
    cases.push_back(std::move(added));
  }
}

std::vector<Case> read_cases(const DemoFlags& flags) {
  std::vector<Case> cases;
  for (const fs::path& path : data_files(flags)) append_cases(path, cases);
  if (cases.empty()) throw Failure(kFileError, "the files hold no tensors NAME.q, NAME.k, NAME.v");
  return cases;
}

// ---- Measurements ------------------------------------------------------------------------------

AttentionOutputs compute(const Context& context, const Case& from, sageattn_attn_desc desc,
                         const AttentionInputs& inputs) {
  desc.layout = from.layout;
  desc.mask = from.mask;
  desc.sm_scale_set = 1;
  desc.sm_scale = from.sm_scale;
  desc.out_dtype = SAGEATTN_F32;  // rounding to 16 bits would hide small errors
  return attend(context, desc, inputs);
}

AttentionOutputs compute_preset(const Context& context, const Case& from,
                                const DemoPreset& preset) {
  const sageattn_attn_desc desc = demo_desc(preset);
  if (!preset.smooths_k_itself) return compute(context, from, desc, from.inputs);
  AttentionInputs smoothed = from.inputs;
  smooth_k_officially(smoothed.k, from.layout);
  return compute(context, from, desc, smoothed);
}

std::vector<const DemoPreset*> chosen_presets(const DemoFlags& flags) {
  std::vector<const DemoPreset*> chosen;
  for (size_t i = 0; i < demo_presets().size(); ++i) {
    const auto index = static_cast<int32_t>(i);
    if (flags.presets.empty() ||
        std::find(flags.presets.begin(), flags.presets.end(), index) != flags.presets.end()) {
      chosen.push_back(&demo_presets()[i]);
    }
  }
  return chosen;
}

std::vector<Row> measure(const DemoFlags& flags, const std::vector<Case>& cases) {
  auto context_desc = sized<sageattn_context_desc>();
  context_desc.backend = SAGEATTN_BACKEND_CPU;
  context_desc.target_arch = kDemoArch;
  context_desc.num_threads = flags.threads;
  const Context context(context_desc);
  const std::vector<const DemoPreset*> presets = chosen_presets(flags);

  std::vector<Row> rows;
  Progress progress(static_cast<int64_t>(cases.size() * (presets.size() + 1)));
  for (const Case& from : cases) {
    const AttentionOutputs exact =
        compute(context, from, preset_desc(SAGEATTN_PRESET_EXACT), from.inputs);
    progress.advance();
    for (const DemoPreset* preset : presets) {
      const AttentionOutputs outputs = compute_preset(context, from, *preset);
      rows.push_back({from.name, from.layer, preset->name,
                      compare_tensors(outputs.out, exact.out, from.layout), outputs.milliseconds,
                      exact.milliseconds});
      progress.advance();
    }
  }
  return rows;
}

// ---- Output ------------------------------------------------------------------------------------

void print_rows_json(const std::vector<Row>& rows) {
  Json json = Json::array();
  for (const Row& row : rows) {
    json.push_back({{"case", row.name},
                    {"layer", row.layer},
                    {"preset", row.preset},
                    {"cos", row.error.cos_sim},
                    {"l1", row.error.rel_l1},
                    {"rmse", row.error.rmse},
                    {"worst_cos", row.error.worst_cos_sim},
                    {"worst_rmse", row.error.worst_rmse},
                    {"ms", row.milliseconds}});
  }
  print_json(json);
}

void print_rows(const std::vector<Row>& rows) {
  constexpr auto kLeft = Table::Align::kLeft;
  Table table({{"case", kLeft},
               {"layer", kLeft},
               {"preset", kLeft},
               {"CosSim"},
               {"L1"},
               {"RMSE"},
               {"worst CosSim"},
               {"worst RMSE"},
               {"ms"},
               {"ms / EXACT"}});
  for (const Row& row : rows) {
    table.add_row({row.name, row.layer, row.preset, fixed(row.error.cos_sim, 6),
                   fixed(row.error.rel_l1, 5), scientific(row.error.rmse),
                   fixed(row.error.worst_cos_sim, 6), scientific(row.error.worst_rmse),
                   fixed(row.milliseconds, 1),
                   fixed(row.milliseconds / row.exact_milliseconds, 2)});
  }
  std::cout << "Error against EXACT, float32 output; worst: over the heads.\n\n";
  table.print(std::cout);
  std::cout << "\nms: what this CPU takes to emulate the arithmetic of sm_" << kDemoArch
            << ". It says nothing about a GPU.\n";
}

ExitCode demo(const DemoFlags& flags) {
  const std::vector<Row> rows = measure(flags, read_cases(flags));
  flags.json ? print_rows_json(rows) : print_rows(rows);
  return kOk;
}

std::string help_of_presets() {
  std::string help = "Presets:";
  for (const DemoPreset& preset : demo_presets()) {
    help += std::string("\n  ") + preset.name + ": " + preset.help;
  }
  return help;
}

}  // namespace

Command add_demo(CLI::App& program) {
  CLI::App* app =
      program.add_subcommand("demo", "Measure each preset on activations of real models");
  const auto flags = std::make_shared<DemoFlags>();
  add_footer(*app, help_of_presets());
  app->add_option("--data", flags->data,
                  "Folder of the .safetensors files (default: the shipped ones)")
      ->type_name("DIR");
  app->add_option("--files", flags->files,
                  "Files in that folder, .safetensors may be left out (default: all)")
      ->type_name("NAME");
  add_enumerants_flag(*app, "--preset", "Presets to measure (default: all)", demo_preset_names(),
                      flags->presets);
  app->add_option("--threads", flags->threads, "Threads (default: all)")->type_name("INT");
  add_json_flag(*app, flags->json);
  return {app, [flags] { return demo(*flags); }};
}

}  // namespace sageattn_cli
