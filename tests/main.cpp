// main() of the test programs that need nothing special.
#include "tests/catch_runner.h"

int main(int argc, char** argv) { return run_tests(argc, argv); }
