// Catch2's own code, compiled once for all test programs: of version 2 it takes longer than any test.
#include "tests/catch_runner.h"

#if __has_include(<catch2/catch_session.hpp>)
#include <catch2/catch_session.hpp>
#else
#define CATCH_CONFIG_RUNNER
#include <catch2/catch.hpp>
#endif

int run_tests(int argc, char** argv) { return Catch::Session().run(argc, argv); }
