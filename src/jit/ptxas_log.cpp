#include "src/jit/ptxas_log.h"

#include <algorithm>
#include <cctype>
#include <charconv>

namespace sageattn::jit {
namespace {

bool contains(std::string_view text, std::string_view piece) {
  return text.find(piece) != std::string_view::npos;
}

// The number before `unit`, as in "used 1 barriers, 128 bytes smem"; 0 if there is none.
int number_before(std::string_view line, std::string_view unit) {
  const size_t end = line.find(unit);
  if (end == std::string_view::npos) return 0;
  size_t start = end;
  while (start > 0 && std::isdigit(static_cast<unsigned char>(line[start - 1])) != 0) --start;
  int number = 0;
  std::from_chars(line.data() + start, line.data() + end, number);
  return number;
}

// The name in "... function 'name' for 'sm_80'" or "Function properties for name".
std::string_view quoted(std::string_view line) {
  const size_t start = line.find('\'');
  if (start == std::string_view::npos) return {};
  line.remove_prefix(start + 1);
  return line.substr(0, line.find('\''));
}

// 7508 in "ptxas info    : (C7508) Potential Performance Loss: ..."; 0 in a line without a code.
int code_of(std::string_view line) {
  const size_t at = line.find("(C");
  const size_t end = line.find(')', at);
  if (at == std::string_view::npos || end == std::string_view::npos) return 0;
  int code = 0;
  const auto [stop, result] = std::from_chars(line.data() + at + 2, line.data() + end, code);
  return result == std::errc() && stop == line.data() + end ? code : 0;
}

}  // namespace

bool PtxasLog::wgmma_serialized() const {
  return std::any_of(advisories.begin(), advisories.end(), [](const PtxasAdvisory& advisory) {
    return contains(advisory.line, "wgmma") && contains(advisory.line, "serialized");
  });
}

bool PtxasLog::has_advisory(int code) const {
  return std::any_of(advisories.begin(), advisories.end(),
                     [code](const PtxasAdvisory& advisory) { return advisory.code == code; });
}

PtxasLog parse_ptxas_log(std::string_view log, std::string_view entry) {
  constexpr std::string_view kProperties = "Function properties for ";
  PtxasLog result;
  std::vector<std::string_view> kernels;  // all of the log, to tell them from functions
  bool in_entry = false;                  // "Used ..." speaks of our kernel
  bool counts = false;                    // "... spill stores" speaks of it or of a function
  while (!log.empty()) {
    const size_t end = std::min(log.find('\n'), log.size());
    std::string_view line = log.substr(0, end);
    log.remove_prefix(std::min(end + 1, log.size()));
    while (!line.empty() && (line.back() == '\r' || line.back() == ' ')) line.remove_suffix(1);

    if (contains(line, "Compiling entry function")) {
      kernels.push_back(quoted(line));
      in_entry = kernels.back() == entry;
      result.found = result.found || in_entry;
      counts = in_entry;
    } else if (const size_t at = line.find(kProperties); at != std::string_view::npos) {
      const std::string_view name = line.substr(at + kProperties.size());
      const bool is_kernel = std::find(kernels.begin(), kernels.end(), name) != kernels.end();
      counts = name == entry || !is_kernel;
    } else if (contains(line, "bytes stack frame")) {
      if (!counts) continue;
      result.stack_bytes += number_before(line, " bytes stack frame");
      result.spill_stores += number_before(line, " bytes spill stores");
      result.spill_loads += number_before(line, " bytes spill loads");
    } else if (contains(line, "Used ") && contains(line, " registers")) {
      if (!in_entry) continue;
      result.registers = number_before(line, " registers");
      result.smem_bytes = number_before(line, " bytes smem");
    }
    if (const int code = code_of(line); code != 0) {
      result.advisories.push_back({code, std::string(line)});
    }
  }
  return result;
}

}  // namespace sageattn::jit
