// sageattn_selftest: does this backend, on this machine, compute attention?
#pragma once

#include "include/sageattn.h"
#include "src/core/context.h"

namespace sageattn {

// Fails with SAGEATTN_E_SELFTEST and names the case.
void selftest(Context& context);

// The largest relative error, of a head, that a plan's numerics explain where inputs have unit
// variance (derived in selftest.cpp).
double error_limit(const sageattn_plan_info& info);

}  // namespace sageattn
