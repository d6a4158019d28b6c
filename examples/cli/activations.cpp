#include "activations.h"

#include <exception>

#include "failure.h"
#include "sageattn.h"

namespace sageattn_cli {
namespace {

std::string metadata(const SafetensorsFile& file, const std::string& path, const std::string& key) {
  const auto found = file.metadata().find(key);
  if (found != file.metadata().end()) return found->second;
  throw Failure(kFileError, path + ": its metadata lacks '" + key + "'");
}

}  // namespace

std::vector<std::string> layers_of(const SafetensorsFile& file) {
  std::vector<std::string> layers;
  for (const std::string& name : file.names()) {
    if (!name.ends_with(".q")) continue;
    const std::string layer = name.substr(0, name.size() - 2);
    if (file.contains(layer + ".k") && file.contains(layer + ".v")) layers.push_back(layer);
  }
  return layers;
}

int32_t metadata_layout(const SafetensorsFile& file, const std::string& path) {
  const std::string text = metadata(file, path, "layout");
  if (text == "NHD") return SAGEATTN_LAYOUT_NHD;
  if (text == "HND") return SAGEATTN_LAYOUT_HND;
  throw Failure(kFileError, path + ": its layout is '" + text + "', not NHD or HND");
}

int32_t metadata_mask(const SafetensorsFile& file, const std::string& path) {
  const std::string text = metadata(file, path, "mask");
  if (text == "causal") return SAGEATTN_MASK_CAUSAL_BOTTOM_RIGHT;
  if (text == "none") return SAGEATTN_MASK_NONE;
  throw Failure(kFileError, path + ": its mask is '" + text + "', not causal or none");
}

float metadata_scale(const SafetensorsFile& file, const std::string& path) {
  const std::string text = metadata(file, path, "sm_scale");
  try {
    return std::stof(text);
  } catch (const std::exception&) {
    throw Failure(kFileError, path + ": its sm_scale is '" + text + "', not a number");
  }
}

}  // namespace sageattn_cli
