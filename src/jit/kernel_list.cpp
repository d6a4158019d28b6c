#include "src/jit/kernel_list.h"

#include <algorithm>
#include <charconv>

#include "src/core/error.h"

namespace sageattn::jit {
namespace {

const KernelSpec kKernels[] = {
#define SAGEATTN_KERNEL(name, source, entry, archs, macros, fmad, min_nvrtc) \
  {name, source, entry, archs, macros, fmad, min_nvrtc},
#include "ptx/kernels/kernels.def"
#undef SAGEATTN_KERNEL
    {}};  // the array is not empty even while the table is

struct MacroColumn {
  std::string name;
  bool any = false;             // "*"
  std::vector<int64_t> values;  // else one of these
};

// Calls visit(piece) for each piece of text between separators.
template <class Visit>
void split(std::string_view text, char separator, Visit visit) {
  while (!text.empty()) {
    const size_t end = std::min(text.find(separator), text.size());
    if (end != 0) visit(text.substr(0, end));
    text.remove_prefix(std::min(end + 1, text.size()));
  }
}

int64_t parse_integer(const KernelSpec& kernel, std::string_view text) {
  int64_t value = 0;
  const auto [end, code] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (code != std::errc() || end != text.data() + text.size()) {
    fail(SAGEATTN_E_INTERNAL, "kernels.def, kernel %s: '%.*s' is not an integer", kernel.name,
         static_cast<int>(text.size()), text.data());
  }
  return value;
}

std::vector<MacroColumn> parse_macros(const KernelSpec& kernel) {
  std::vector<MacroColumn> columns;
  split(kernel.macros, ' ', [&](std::string_view item) {
    const size_t equals = item.find('=');
    if (equals == std::string_view::npos || equals == 0 || equals + 1 == item.size()) {
      fail(SAGEATTN_E_INTERNAL, "kernels.def, kernel %s: macro '%.*s' is not NAME=VALUES",
           kernel.name, static_cast<int>(item.size()), item.data());
    }
    MacroColumn column;
    column.name = item.substr(0, equals);
    const std::string_view values = item.substr(equals + 1);
    column.any = values == "*";
    if (!column.any) {
      split(values, ',',
            [&](std::string_view value) { column.values.push_back(parse_integer(kernel, value)); });
    }
    columns.push_back(std::move(column));
  });
  return columns;
}

std::string allowed_text(const MacroColumn& column) {
  std::string text;
  for (const int64_t value : column.values) {
    text += (text.empty() ? "" : ", ") + std::to_string(value);
  }
  return column.any ? "any integer" : text;
}

}  // namespace

std::span<const KernelSpec> kernel_list() { return {kKernels, std::size(kKernels) - 1}; }

const KernelSpec& find_kernel(std::span<const KernelSpec> kernels, std::string_view name) {
  for (const KernelSpec& kernel : kernels) {
    if (kernel.name == name) return kernel;
  }
  fail(SAGEATTN_E_INTERNAL, "kernel = %.*s: not in kernels.def", static_cast<int>(name.size()),
       name.data());
}

std::string arch_name(const KernelSpec& kernel, int arch) {
  std::string name;
  split(kernel.archs, ' ', [&](std::string_view item) {
    const bool later = item.back() == '+';
    const bool own = item.back() == 'a';
    const std::string_view digits = item.substr(0, item.size() - (later || own ? 1 : 0));
    const int64_t listed = parse_integer(kernel, digits);
    if (name.empty() && (listed == arch || (later && listed < arch))) {
      name = "sm_" + std::to_string(arch) + (own ? "a" : "");
    }
  });
  return name;
}

std::vector<Macro> resolve_macros(const KernelSpec& kernel, std::span<const Macro> chosen) {
  std::vector<Macro> macros;
  size_t used = 0;
  for (const MacroColumn& column : parse_macros(kernel)) {
    const auto is_this = [&](const Macro& macro) { return macro.name == column.name; };
    const auto choice = std::find_if(chosen.begin(), chosen.end(), is_this);
    if (choice == chosen.end()) {
      if (column.any || column.values.size() != 1) {
        fail(SAGEATTN_E_INTERNAL, "kernel = %s: the request gives no %s (%s)", kernel.name,
             column.name.c_str(), allowed_text(column).c_str());
      }
      macros.push_back({column.name, column.values.front()});
      continue;
    }
    const auto& values = column.values;
    if (!column.any && std::find(values.begin(), values.end(), choice->value) == values.end()) {
      fail(SAGEATTN_E_INTERNAL, "kernel = %s: %s = %lld: must be one of %s", kernel.name,
           column.name.c_str(), static_cast<long long>(choice->value),
           allowed_text(column).c_str());
    }
    macros.push_back({column.name, choice->value});
    ++used;
  }
  if (used != chosen.size()) {
    fail(SAGEATTN_E_INTERNAL,
         "kernel = %s: the request defines a macro twice or one that is not %s", kernel.name,
         kernel.macros[0] != '\0' ? kernel.macros : "there (the kernel has none)");
  }
  return macros;
}

std::vector<std::vector<Macro>> macro_sets(const KernelSpec& kernel) {
  std::vector<std::vector<Macro>> sets(1);
  for (const MacroColumn& column : parse_macros(kernel)) {
    if (column.any) {
      fail(SAGEATTN_E_INTERNAL, "kernel = %s: the values of %s are not listed", kernel.name,
           column.name.c_str());
    }
    std::vector<std::vector<Macro>> longer;
    for (const std::vector<Macro>& set : sets) {
      for (const int64_t value : column.values) {
        longer.push_back(set);
        longer.back().push_back({column.name, value});
      }
    }
    sets = std::move(longer);
  }
  return sets;
}

}  // namespace sageattn::jit
