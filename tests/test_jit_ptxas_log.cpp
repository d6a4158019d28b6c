// The parser of ptxas's log, on logs as NVRTC wrote them.
#include "src/jit/ptxas_log.h"
#include "tests/catch.h"

using sageattn::jit::parse_ptxas_log;
using sageattn::jit::PtxasLog;

namespace {

// NVRTC 13.0.
constexpr char kPlain[] =
    "ptxas info    : 0 bytes gmem\n"
    "ptxas info    : Compiling entry function 'k' for 'sm_90a'\n"
    "ptxas info    : Function properties for k\n"
    "ptxas         .     0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads\n"
    "ptxas info    : Used 10 registers, used 1 barriers, 128 bytes smem\n"
    "ptxas info    : Compile time = 2.842 ms\n";

constexpr char kSpills[] =
    "ptxas info    : 0 bytes gmem\n"
    "ptxas info    : Compiling entry function 'k' for 'sm_80'\n"
    "ptxas info    : Function properties for k\n"
    "ptxas         .     856 bytes stack frame, 1176 bytes spill stores, 1220 bytes spill loads\n"
    "ptxas info    : Used 32 registers, used 0 barriers, 856 bytes cumulative stack size, 364 "
    "bytes "
    "cmem[0]\n"
    "ptxas info    : Compile time = 35.318 ms\n";

// The layout of CUDA 12.
constexpr char kOlder[] =
    "ptxas info    : 0 bytes gmem, 24 bytes cmem[4]\n"
    "ptxas info    : Compiling entry function 'k' for 'sm_86'\r\n"
    "ptxas info    : Function properties for k\r\n"
    "    16 bytes stack frame, 12 bytes spill stores, 8 bytes spill loads\r\n"
    "ptxas info    : Used 255 registers, 16 bytes cumulative stack size, 49152 bytes smem, 400 "
    "bytes "
    "cmem[0]\r\n";

// Two kernels and a function that is not inlined.
constexpr char kTwo[] =
    "ptxas info    : 0 bytes gmem\n"
    "ptxas info    : Compiling entry function 'k2' for 'sm_80'\n"
    "ptxas info    : Function properties for k2\n"
    "ptxas         .     64 bytes stack frame, 40 bytes spill stores, 44 bytes spill loads\n"
    "ptxas info    : Used 8 registers, used 1 barriers, 360 bytes cmem[0]\n"
    "ptxas info    : Compiling entry function 'k' for 'sm_80'\n"
    "ptxas info    : Function properties for k\n"
    "ptxas         .     0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads\n"
    "ptxas info    : Used 10 registers, used 0 barriers, 96 bytes smem, 360 bytes cmem[0]\n"
    "ptxas info    : Compile time = 0.885 ms\n"
    "ptxas info    : Function properties for _Z3fffPf\n"
    "ptxas         .     8 bytes stack frame, 4 bytes spill stores, 4 bytes spill loads\n";

constexpr char kSerialized[] =
    "ptxas info    : (C7519) warpgroup.arrive is injected in around line 69 by compiler to allow "
    "use "
    "of registers in GMMA in function 'k'\n"
    "ptxas info    : (C7517) warpgroup.wait is injected in around line 48 by compiler to allow use "
    "of registers defined by GMMA in function 'k'\n"
    "ptxas info    : (C7515) Potential Performance Loss: wgmma.mma_async instructions are "
    "serialized "
    "due to non wgmma instructions defining accumulator registers of a wgmma between start and end "
    "of the pipeline stage in the function 'k'\n";

TEST_CASE("ptxas log: registers, spills, shared memory") {
  const PtxasLog plain = parse_ptxas_log(kPlain, "k");
  CHECK(plain.found);
  CHECK(plain.registers == 10);
  CHECK(plain.smem_bytes == 128);
  CHECK(plain.spill_stores + plain.spill_loads + plain.stack_bytes == 0);
  CHECK(plain.advisories.empty());

  const PtxasLog spills = parse_ptxas_log(kSpills, "k");
  CHECK(spills.registers == 32);
  CHECK(spills.stack_bytes == 856);
  CHECK(spills.spill_stores == 1176);
  CHECK(spills.spill_loads == 1220);
  CHECK(spills.smem_bytes == 0);

  const PtxasLog older = parse_ptxas_log(kOlder, "k");
  CHECK(older.registers == 255);
  CHECK(older.spill_stores == 12);
  CHECK(older.spill_loads == 8);
  CHECK(older.smem_bytes == 49152);
}

TEST_CASE("ptxas log: a kernel among others, with the functions it may call") {
  const PtxasLog k = parse_ptxas_log(kTwo, "k");
  CHECK(k.registers == 10);
  CHECK(k.smem_bytes == 96);
  CHECK(k.spill_stores == 4);
  CHECK(k.spill_loads == 4);
  const PtxasLog k2 = parse_ptxas_log(kTwo, "k2");
  CHECK(k2.registers == 8);
  CHECK(k2.spill_stores == 44);
  CHECK(k2.spill_loads == 48);
  CHECK_FALSE(parse_ptxas_log(kTwo, "k3").found);
  CHECK_FALSE(parse_ptxas_log("", "k").found);
}

TEST_CASE("ptxas log: advisories") {
  const PtxasLog log = parse_ptxas_log(std::string(kSerialized) + kPlain, "k");
  CHECK(log.registers == 10);
  REQUIRE(log.advisories.size() == 3);
  CHECK(log.advisories[1].code == 7517);
  CHECK(log.advisories[1].line.find("around line 48") != std::string::npos);
  CHECK(log.wgmma_serialized());
  CHECK(log.has_advisory(7515));
  CHECK_FALSE(log.has_advisory(7508));

  for (const int code : {7508, 7512}) {
    const std::string line = "ptxas info    : (C" + std::to_string(code) +
                             ") Potential Performance Loss: wgmma.mma_async instructions are "
                             "serialized due to insufficient register resources in function 'k'";
    CHECK(parse_ptxas_log(line, "k").has_advisory(code));
    CHECK(parse_ptxas_log(line, "k").wgmma_serialized());
  }
  // An injected wait alone does not serialise.
  const std::string injected =
      "ptxas info    : (C7517) warpgroup.wait is injected in around line 1";
  CHECK(parse_ptxas_log(injected, "k").has_advisory(7517));
  CHECK_FALSE(parse_ptxas_log(injected, "k").wgmma_serialized());
  for (const char* other : {"(C)", "(C75", "(Cx7508)", "(C7508x)", "("}) {
    CHECK(parse_ptxas_log(other, "k").advisories.empty());
  }
}

}  // namespace
