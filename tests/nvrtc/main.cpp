// main() of the tests that need NVRTC: exits with 77 (skipped) where there is none. Also the
// processes that test_jit_nvrtc.cpp starts: "--worker <argument>..." goes to nvrtc_worker().
#include <cstdio>
#include <cstring>

#include "src/jit/nvrtc.h"
#include "tests/catch_runner.h"

int nvrtc_worker(int argc, char** argv);  // test_jit_nvrtc.cpp

int main(int argc, char** argv) {
  constexpr int kSkipped = 77;
  if (argc > 1 && std::strcmp(argv[1], "--worker") == 0) return nvrtc_worker(argc - 2, argv + 2);
  const sageattn::jit::NvrtcSearch search = sageattn::jit::find_nvrtc("");
  if (search.nvrtc == nullptr) {
    std::printf("skipped: no NVRTC: %s\n", search.tried_text().c_str());
    return kSkipped;
  }
  return run_tests(argc, argv);
}
