// sageattn_selftest: does this backend, on this machine, compute attention?
#pragma once

#include "src/core/context.h"

namespace sageattn {

// Fails with SAGEATTN_E_SELFTEST and names the case.
void selftest(Context& context);

}  // namespace sageattn
