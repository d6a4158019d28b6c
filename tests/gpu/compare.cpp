#include "tests/gpu/compare.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <stdexcept>
#include <tuple>

#include "src/cpu/formats.h"
#include "tests/gpu/codes.h"

namespace sageattn_test {

namespace {

struct Tolerance {
  double hard, rms;  // of out, relative to sum p |v|
  double out_step;   // of the output type
  double lse;        // absolute
};

Tolerance tolerance_of(const sageattn_plan_info& info, const Problem& p, const LiteralInput& in) {
  // The largest |score|, in base 2.
  const auto largest_norm = [](const std::vector<float>& x, int channels) {
    double largest = 0;
    for (size_t row = 0; row + static_cast<size_t>(channels) <= x.size();
         row += static_cast<size_t>(channels)) {
      double sum = 0;
      for (int c = 0; c < channels; ++c) {
        sum +=
            static_cast<double>(x[row + static_cast<size_t>(c)]) * x[row + static_cast<size_t>(c)];
      }
      if (std::isfinite(sum)) largest = std::max(largest, sum);
    }
    return std::sqrt(largest);
  };
  const double score = std::fabs(p.scale()) * 1.4427 * largest_norm(in.q, p.shape.head_dim) *
                       largest_norm(in.k, p.shape.head_dim);
  const bool exact = info.qk_format == SAGEATTN_QK_NONE;
  // The argument: the product, the offset and their sum, each rounded once; EXACT sums in fp32.
  const double e = std::ldexp(score, exact ? -18 : -21) + std::ldexp(1.0, -20);
  double step = std::ldexp(1.0, -10);
  if (info.pv_format == SAGEATTN_PV_E4M3) step = std::ldexp(1.0, -3);
  if (exact && p.kv_dtype == SAGEATTN_BF16) step = std::ldexp(1.0, -7);

  double accumulator = std::ldexp(1.0, -19);
  if (info.pv_accum == SAGEATTN_PV_ACCUM_F16) accumulator = std::ldexp(1.0, -8);
  const bool assumed = info.pv_format == SAGEATTN_PV_E4M3 && info.arch != 90;
  if (assumed) accumulator = std::max(accumulator, std::ldexp(1.0, -9));

  Tolerance t{};
  if (info.out_dtype == SAGEATTN_F16) t.out_step = std::ldexp(1.0, -10);
  if (info.out_dtype == SAGEATTN_BF16) t.out_step = std::ldexp(1.0, -7);
  t.hard = 2 * (e + step) + accumulator;  // twice: numerator and row sum
  // EXACT is compared with P that was never rounded.
  const double rms = exact ? step / 2 + e : 4 * std::sqrt(2 * e * step) + 2 * e;
  t.rms = std::min(t.hard, rms + accumulator / 2);
  t.rms += std::sqrt(2 * t.rms * t.out_step);
  const double sum_error = info.row_sum == SAGEATTN_ROW_SUM_P && !exact ? e : e + step;
  t.lse = sum_error + std::ldexp(score, -18) + std::ldexp(1.0, -16);
  return t;
}

// As bits, but for what NaN and zero are made of.
bool same_value(double a, double b) { return a == b || (std::isnan(a) && std::isnan(b)); }

// M of compare.h for every output, in fp32. Unsmoothed, |V| has the codes of V but for their signs.
Tensor magnitude_of(const Problem& p, const Numerics& numerics, const Data& data,
                    const Lengths& hostile) {
  Problem positive = p;
  positive.out_dtype = SAGEATTN_F32;
  Numerics unsmoothed = numerics;
  unsmoothed.desc.smooth_v = SAGEATTN_SMOOTH_V_OFF;
  Data absolute = data;
  for (LiteralInput& sequence : absolute) {
    for (float& v : sequence.v) v = std::fabs(v);
  }
  const PlanResult plan = make_plan(shared_context(numerics.arch, 1), positive, unsmoothed);
  if (plan.status != SAGEATTN_OK) throw std::runtime_error("sum p |v|: " + plan.message);
  Buffers buffers = make_buffers(positive, absolute, hostile);
  buffers.out.image = run_cpu(positive, buffers, plan).out;
  return buffers.out;
}

// All sequences as one: with hostile lengths any of them may stand in another's rows.
LiteralInput all_of(const Data& data) {
  LiteralInput all;
  for (const LiteralInput& sequence : data) {
    all.q.insert(all.q.end(), sequence.q.begin(), sequence.q.end());
    all.k.insert(all.k.end(), sequence.k.begin(), sequence.k.end());
  }
  return all;
}

// Rows of the sequence in both images; empty, or what is wrong.
std::string compare_rows(const Problem& p, const Buffers& buffers, const Outcome& gpu,
                         const Outcome& cpu, int sequence, int64_t start, int64_t rows,
                         const Tensor& magnitudes, const Tolerance& t, Worst& worst) {
  const bool varlen = p.batch_mode == SAGEATTN_BATCH_VARLEN;
  const int b = varlen ? 0 : sequence;
  const AttentionShape& s = p.shape;
  struct Sums {
    double difference = 0, scale = 0;
  };
  std::vector<Sums> heads(static_cast<size_t>(s.num_qo_heads));
  char text[256];
  for (int64_t row = 0; row < rows; ++row) {
    for (int h = 0; h < s.num_qo_heads; ++h) {
      Sums& head = heads[static_cast<size_t>(h)];
      for (int c = 0; c < s.head_dim_v; ++c) {
        const size_t at = buffers.out.at(b, start + row, h, c);
        const double got = load(&gpu.out[at], p.out_dtype), want = load(&cpu.out[at], p.out_dtype);
        const double magnitude =
            load(&magnitudes.image[magnitudes.at(b, start + row, h, c)], SAGEATTN_F32);
        if (std::isfinite(magnitude)) head.scale += magnitude * magnitude;
        if (same_value(got, want)) continue;
        const double allowed = t.hard * magnitude + 1.01 * t.out_step * std::fabs(want) + 1e-37;
        const double error = std::fabs(got - want);
        if (!(error <= allowed)) {
          std::snprintf(text, sizeof text,
                        "out of sequence %d token %lld head %d channel %d: got %.9g, want %.9g, "
                        "allowed difference %.3g",
                        sequence, static_cast<long long>(row), h, c, got, want, allowed);
          return text;
        }
        worst.hard = std::max(worst.hard, error / allowed);
        head.difference += error * error;
      }
      const size_t at = buffers.lse.at(b, start + row, h, 0);
      const double got = load(&gpu.lse[at], SAGEATTN_F32), want = load(&cpu.lse[at], SAGEATTN_F32);
      if (same_value(got, want)) continue;
      const double allowed = t.lse + std::ldexp(std::fabs(want), -20);
      if (!(std::fabs(got - want) <= allowed)) {
        std::snprintf(text, sizeof text,
                      "lse of sequence %d token %lld head %d: got %.9g, want %.9g, allowed "
                      "difference %.3g",
                      sequence, static_cast<long long>(row), h, got, want, allowed);
        return text;
      }
      worst.lse = std::max(worst.lse, std::fabs(got - want) / allowed);
    }
  }
  // Few rows, or values, make no mean.
  const auto excess = [&](const Sums& sums, int64_t count, int64_t enough) -> double {
    if (sums.scale == 0 || count < enough) return 0;
    const double rms = std::sqrt(sums.difference / sums.scale);
    worst.rms = std::max(worst.rms, rms / t.rms);
    return rms > t.rms ? rms : 0;
  };
  Sums all;
  for (size_t h = 0; h < heads.size(); ++h) {
    all.difference += heads[h].difference;
    all.scale += heads[h].scale;
    // What is wrong in one head only is lost in the mean of many.
    if (const double rms = excess(heads[h], rows, 128); rms != 0) {
      std::snprintf(text, sizeof text,
                    "out of sequence %d head %zu: relative difference %.3g, allowed %.3g", sequence,
                    h, rms, t.rms);
      return text;
    }
  }
  if (const double rms = excess(all, rows * s.num_qo_heads, 64); rms != 0) {
    std::snprintf(text, sizeof text, "out of sequence %d: relative difference %.3g, allowed %.3g",
                  sequence, rms, t.rms);
    return text;
  }
  return {};
}

// Everything outside the rows that are compared holds what it held.
std::string compare_rest(const Buffers& buffers, const Outcome& gpu, const Outcome& cpu) {
  for (const auto& [name, tensor, got, want] :
       {std::tuple{"out", &buffers.out, &gpu.out, &cpu.out},
        std::tuple{"lse", &buffers.lse, &gpu.lse, &cpu.lse}}) {
    const int32_t dtype = tensor->dtype();
    const auto size = static_cast<size_t>(dtype_size(dtype));
    for (size_t i = 0; i < want->size(); i += size) {
      const auto untouched = [&](const std::vector<unsigned char>& image) {
        return std::all_of(image.begin() + static_cast<int64_t>(i),
                           image.begin() + static_cast<int64_t>(i + size),
                           [](unsigned char x) { return x == kCanary; });
      };
      if (untouched(*want) != untouched(*got)) {
        return std::string(name) + ": byte " + std::to_string(i) +
               (untouched(*got) ? " was not written" : " was written, and must not be");
      }
    }
  }
  return {};
}

}  // namespace

void Worst::take(const Worst& other) {
  hard = std::max(hard, other.hard);
  rms = std::max(rms, other.rms);
  lse = std::max(lse, other.lse);
}

CaseReport check_case(const Gpu& gpu, const Problem& p, const Numerics& numerics, const Data& data,
                      const Lengths& hostile) {
  CaseReport report;
  const auto failed = [&](const std::string& message) {
    report.verdict = CaseReport::kFailed;
    report.message = message;
    return report;
  };
  const PlanResult plan = make_plan(gpu.context(), p, numerics);
  if (plan.status == SAGEATTN_E_UNSUPPORTED) {
    report.verdict = CaseReport::kSkipped;
    report.message = plan.message;
    return report;
  }
  if (plan.status != SAGEATTN_OK) return failed(plan.message);
  const Numerics same = same_numerics(numerics, plan.info);
  const PlanResult cpu_plan = make_plan(shared_context(same.arch, 1), p, same);
  if (cpu_plan.status != SAGEATTN_OK) return failed("CPU backend: " + cpu_plan.message);

  const Buffers buffers = make_buffers(p, data, hostile);
  Outcome& got = report.gpu = run_gpu(gpu, p, buffers, plan);
  const Outcome want = run_cpu(p, buffers, cpu_plan);
  if (got.status != want.status) {
    return failed("status " + std::to_string(got.status) + " (" + got.message + "), CPU backend " +
                  std::to_string(want.status) + " (" + want.message + ")");
  }
  if (!got.violation.empty()) return failed(got.violation);
  if (got.words != want.words) return failed("status words differ");
  const std::string rest = compare_rest(buffers, got, want);
  if (!rest.empty()) return failed(rest);
  // Before the outputs: where codes differ, outputs do, too.
  if (got.status == SAGEATTN_OK) {
    const CodesReport codes = compare_codes(p, buffers, plan, got, cpu_plan);
    report.codes = codes.compared;
    if (!codes.message.empty()) return failed(codes.message);
  }

  const Tensor magnitudes = magnitude_of(p, same, data, hostile);
  const bool varlen = p.batch_mode == SAGEATTN_BATCH_VARLEN;
  const bool hostile_lengths = !hostile.cu_q.empty() || !hostile.cu_kv.empty();
  for (int b = 0; b < p.batch(); ++b) {
    const auto n = static_cast<size_t>(b);
    // Of a sequence with nonsense lengths only NaN is compared, below.
    if (hostile_lengths && got.words[n + 1] != SAGEATTN_SEQUENCE_OK) continue;
    const int64_t start = varlen ? buffers.cu_q[n] : 0;
    const int64_t rows = varlen ? buffers.cu_q[n + 1] - start : p.qo_lens[n];
    const Tolerance t = tolerance_of(plan.info, p, hostile_lengths ? all_of(data) : data[n]);
    const std::string message =
        compare_rows(p, buffers, got, want, b, start, rows, magnitudes, t, report.worst);
    if (!message.empty()) return failed(message);
  }
  for (size_t i = 0; hostile_lengths && i < want.out.size();
       i += static_cast<size_t>(dtype_size(p.out_dtype))) {
    if (std::isnan(load(&got.out[i], p.out_dtype)) != std::isnan(load(&want.out[i], p.out_dtype))) {
      return failed("out: NaN at different places, byte " + std::to_string(i));
    }
  }
  return report;
}

}  // namespace sageattn_test
