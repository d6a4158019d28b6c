// Checks by name, each of which is run with several numerics.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "tests/gpu/setup.h"
#include "tests/grid.h"

namespace sageattn_test {

struct NamedCheck {
  const char* name;
  // What is wrong, or nothing. Throws Skipped where it does not apply.
  std::function<std::string(const Gpu&, const Numerics&)> run;
};

std::vector<NamedCheck> first_checks();    // before anything else is loaded
std::vector<NamedCheck> general_checks();  // checks.cpp
// shapes.cpp: shapes that users of such libraries reported as wrong; and those that need gigabytes.
std::vector<NamedCheck> reported_shapes();
std::vector<NamedCheck> large_shapes();

}  // namespace sageattn_test
