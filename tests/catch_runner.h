#pragma once

// What main() of a Catch2 program does, and returns.
int run_tests(int argc, char** argv);
