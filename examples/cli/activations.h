// Files of activations: tensors NAME.q, NAME.k and NAME.v of several layers, and metadata that says
// how they are to be read (examples/data/README.md).
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "tensor_io.h"

namespace sageattn_cli {

// Names with the tensors .q, .k and .v.
std::vector<std::string> layers_of(const SafetensorsFile& file);

// The metadata "layout", "mask" and "sm_scale". They throw Failure(kFileError) with `path` if it is
// missing or says something unknown.
int32_t metadata_layout(const SafetensorsFile& file, const std::string& path);
int32_t metadata_mask(const SafetensorsFile& file, const std::string& path);
float metadata_scale(const SafetensorsFile& file, const std::string& path);

}  // namespace sageattn_cli
