// The descriptor fields that a user may set, in one table: it gives the flags, their help, the
// names of their values, and the names in JSON output.
#pragma once

#include <CLI/CLI.hpp>
#include <cstdint>
#include <functional>
#include <nlohmann/json.hpp>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "sageattn.h"

namespace sageattn_cli {

class Context;

using Json = nlohmann::ordered_json;

struct Enumerant {
  const char* name;
  int32_t value;
};

struct DescOption {
  const char* name;  // of the field; its flag has '-' for '_'
  const char* help;
  std::span<const Enumerant> enumerants;  // empty: the value is an integer
  int32_t sageattn_attn_desc::*desc_field;
  int32_t sageattn_plan_info::*info_field;  // where the plan has the resolved value; may be null
};

std::span<const DescOption> desc_options();

extern const std::span<const Enumerant> kPresets;
extern const std::span<const Enumerant> kLayouts;
extern const std::span<const Enumerant> kBackends;
extern const std::span<const Enumerant> kDtypes;
extern const std::span<const Enumerant> kKernels;

// The name of a value, or the number itself if it has none.
std::string name_of(std::span<const Enumerant> enumerants, int32_t value);

// The value of a name, in either case. Any other text is a usage error that lists the names.
int32_t parse_enumerant(const std::string& flag, const std::string& text,
                        std::span<const Enumerant> enumerants);

// "auto|i8|i4"
std::string join_names(std::span<const Enumerant> enumerants, const char* separator);

// Adds a flag that takes one of the names and gives its value to `set`.
void add_enumerant_flag(CLI::App& app, const std::string& flag, const std::string& help,
                        std::span<const Enumerant> enumerants, std::function<void(int32_t)> set);

// The elements of lists with commas between. An empty one, which CLI11 would drop or take for 0, is a
// usage error.
std::vector<std::string> split_lists(const std::string& flag,
                                     const std::vector<std::string>& lists);

// Adds a flag that takes some of the names, with commas between or each with a flag of its own, and
// appends their values, which outlive the parse.
void add_enumerants_flag(CLI::App& app, const std::string& flag, const std::string& help,
                         std::span<const Enumerant> enumerants, std::vector<int32_t>& values);

// Fields of the table that flags changed.
class FieldFlags {
 public:
  // Adds the flags of the options that `takes` accepts; *this outlives the parse.
  void add_to(CLI::App& app, const std::function<bool(const DescOption&)>& takes);
  void apply(sageattn_attn_desc& desc) const;
  Json json() const;  // what was given, by field

 private:
  std::vector<std::pair<const DescOption*, int32_t>> changes_;
};

// A preset and the fields that flags changed.
class DescFlags {
 public:
  void add_to(CLI::App& app);  // *this outlives the parse
  sageattn_attn_desc desc() const;

 private:
  int32_t preset_ = SAGEATTN_PRESET_AUTO;
  FieldFlags fields_;
  std::optional<float> sm_scale_;
};

// A preset's descriptor, before types, heads and limits.
sageattn_attn_desc preset_desc(int32_t preset);

// --backend, --device, --arch and --threads.
struct ContextFlags {
  int32_t backend = SAGEATTN_BACKEND_AUTO;
  int32_t device = 0;
  int32_t arch = 0;
  int32_t threads = 0;

  void add_to(CLI::App& app);  // *this outlives the parse
  sageattn_context_desc desc() const;
};

// A field that plays no part in the plan is null.
Json plan_json(const sageattn_plan_info& info);

// Name and value of every resolved field of the table; "-" if it plays no part in the plan.
std::vector<std::pair<std::string, std::string>> plan_numerics(const sageattn_plan_info& info);

// The lines of sageattn_context_report; what has several is a list.
Json report_json(const Context& context);

}  // namespace sageattn_cli
