// sageattn compare: how far one tensor is from another.
#include <iostream>
#include <memory>
#include <optional>
#include <string>

#include "attention.h"
#include "commands.h"
#include "library.h"
#include "table.h"
#include "tensor_io.h"

namespace sageattn_cli {
namespace {

struct CompareFlags {
  std::string out, ref;
  int32_t layout = SAGEATTN_LAYOUT_NHD;
  std::optional<double> max_rel_error;
  bool bf16 = false;
  bool json = false;
};

void require_same_shape(const CompareFlags& flags, const Tensor& out, const Tensor& ref) {
  if (out.shape == ref.shape) return;
  throw Failure(kFileError, flags.out + " has shape " + to_string(out.shape) + " but " + flags.ref +
                                " has shape " + to_string(ref.shape));
}

void check_limit(const CompareFlags& flags) {
  if (!flags.max_rel_error || *flags.max_rel_error >= 0) return;
  throw CLI::ValidationError("--max-rel-error", "must not be negative or NaN");
}

bool within_limit(const CompareFlags& flags, const sageattn_compare_result& result) {
  if (!flags.max_rel_error) return true;
  // Elements that are not finite take no part in rel_error, which may itself be NaN.
  return result.nonfinite_out == 0 && result.nonfinite_ref == 0 &&
         result.rel_error <= *flags.max_rel_error;
}

std::string worst_head(const sageattn_compare_result& result, int64_t heads) {
  if (result.worst_head < 0) return "none";
  return "batch " + std::to_string(result.worst_head / heads) + ", head " +
         std::to_string(result.worst_head % heads);
}

void print_table(const sageattn_compare_result& result, int64_t heads) {
  Table table({{"metric", Table::Align::kLeft}, {"all"}, {"worst head"}});
  table.add_row({"CosSim", fixed(result.cos_sim, 8), fixed(result.worst_cos_sim, 8)});
  table.add_row({"L1", scientific(result.rel_l1), scientific(result.worst_rel_l1)});
  table.add_row({"RMSE", scientific(result.rmse), scientific(result.worst_rmse)});
  table.add_row(
      {"relative error", scientific(result.rel_error), scientific(result.worst_rel_error)});
  table.add_row({"max error", scientific(result.max_abs_error), ""});
  table.print(std::cout);
  std::cout << "elements: " << result.count << '\n'
            << "not finite: " << result.nonfinite_out << " in A, " << result.nonfinite_ref
            << " in B\n"
            << "worst head by CosSim: " << worst_head(result, heads) << '\n';
}

void print(const CompareFlags& flags, const sageattn_compare_result& result, int64_t heads) {
  if (!flags.json) return print_table(result, heads);
  print_json({
      {"count", result.count},
      {"nonfinite_out", result.nonfinite_out},
      {"nonfinite_ref", result.nonfinite_ref},
      {"cos_sim", result.cos_sim},
      {"rel_l1", result.rel_l1},
      {"rmse", result.rmse},
      {"rel_error", result.rel_error},
      {"max_abs_error", result.max_abs_error},
      {"worst_head", result.worst_head},
      {"worst_cos_sim", result.worst_cos_sim},
      {"worst_rel_l1", result.worst_rel_l1},
      {"worst_rmse", result.worst_rmse},
      {"worst_rel_error", result.worst_rel_error},
      {"within_limit", flags.max_rel_error ? Json(within_limit(flags, result)) : Json()},
  });
}

ExitCode compare(const CompareFlags& flags) {
  check_limit(flags);
  const Tensor out = read_operand(flags.out, flags.bf16);
  const Tensor ref = read_operand(flags.ref, flags.bf16);
  require_same_shape(flags, out, ref);
  const View view = view_of(out, flags.layout, flags.out);
  const sageattn_compare_result result = compare_tensors(out, ref, flags.layout);
  print(flags, result, view.heads);
  if (within_limit(flags, result)) return kOk;
  std::cerr << "sageattn: the relative error " << scientific(result.rel_error)
            << " is above the limit " << scientific(*flags.max_rel_error)
            << ", or elements are not finite\n";
  return kFailed;
}

}  // namespace

Command add_compare(CLI::App& program) {
  CLI::App* app = program.add_subcommand("compare", "Measure the error of A against B");
  const auto flags = std::make_shared<CompareFlags>();
  add_footer(*app,
             "In JSON, an error that is infinite or NaN is null, and so is within_limit without\n"
             "--max-rel-error.");
  app->add_option("A", flags->out, "Tensor to judge (.npy or .safetensors:NAME)")->required();
  app->add_option("B", flags->ref, "What it should be")->required();
  add_enumerant_flag(*app, "--layout", "Order of tokens (N) and heads (H)", kLayouts,
                     [flags](int32_t value) { flags->layout = value; });
  app->add_option("--max-rel-error", flags->max_rel_error,
                  "Exit with 1 if |A - B| / |B| is larger, or if any element is not finite")
      ->type_name("FLOAT");
  app->add_flag("--bf16", flags->bf16, "Read uint16 as bfloat16");
  add_json_flag(*app, flags->json);
  return {app, [flags] { return compare(*flags); }};
}

}  // namespace sageattn_cli
