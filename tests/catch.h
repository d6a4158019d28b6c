// The test framework: Catch2 version 3 or 2, whichever is installed. Both provide TEST_CASE,
// SECTION, REQUIRE, CHECK, INFO, CAPTURE and GENERATE.
#pragma once

#if __has_include(<catch2/catch_test_macros.hpp>)
#include <catch2/catch_approx.hpp>
#include <catch2/catch_message.hpp>
#include <catch2/catch_test_macros.hpp>
#include <catch2/generators/catch_generators.hpp>
#include <catch2/generators/catch_generators_range.hpp>
using Catch::Approx;
#else
#include <catch2/catch.hpp>
#endif
