// An assessment as one HTML page that needs nothing from outside.
#pragma once

#include <string>
#include <vector>

#include "assess.h"

namespace sageattn_cli {

struct AssessedLayer {
  std::string name;
  LayerAssessment result;
};

std::string assess_html(const std::string& title, const std::vector<AssessedLayer>& layers,
                        const AssessTarget& target, const Recommendation& overall);

// "sage2_4b, smooth V"
std::string text_of(const Recommendation& recommendation);

// "a relative error of at most 5.00 %"
std::string text_of(const AssessTarget& target);

}  // namespace sageattn_cli
