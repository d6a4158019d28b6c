// sageattn_compare: how far one tensor is from another.
#pragma once

#include "include/sageattn.h"
#include "src/core/validate.h"

namespace sageattn {

sageattn_compare_result compare(const Comparison& comparison);

}  // namespace sageattn
