#include "assess_html.h"

#include <algorithm>
#include <cmath>
#include <sstream>

#include "options.h"
#include "table.h"

namespace sageattn_cli {
namespace {

// Colours of errors, from small to large; each is for errors up to twice those of the one before.
// The target lies between the fifth and the sixth.
constexpr int kShades = 9;
constexpr int kShadesWithin = 5;
constexpr int kCellHeight = 24, kLabelWidth = 110, kTopHeight = 22;

constexpr const char* kStyle = R"(
:root { color-scheme: light dark; --page: #fcfcfb; --ink: #1d1d1b; --soft: #63635d; --line: #d9d9d3;
  --before: #9a9a92; --after: #2a6fbb;
  --s0: #eef4fb; --s1: #dbe9f6; --s2: #bfd8ee; --s3: #9cc2e3; --s4: #74a7d3;
  --s5: #f6c88f; --s6: #ec9b4d; --s7: #d46a1f; --s8: #9f3f08; --none: #e9e9e4;
  --on-light: #1d1d1b; --on-dark: #ffffff; --p0: #74a7d3; --p1: #dbe9f6; --p2: #ec9b4d; --p3: #9f3f08; }
@media (prefers-color-scheme: dark) { :root { --page: #181a1b; --ink: #e8e8e3; --soft: #a3a39c;
  --line: #3a3d3f; --before: #85857d; --after: #62a8f0;
  --s0: #16283a; --s1: #1b3650; --s2: #214668; --s3: #285884; --s4: #316ca3;
  --s5: #6b4416; --s6: #96591a; --s7: #c9772a; --s8: #f3a765; --none: #2c2f30;
  --on-light: #e8e8e3; --on-dark: #181a1b; --p0: #316ca3; --p1: #1b3650; --p2: #96591a; --p3: #f3a765; } }
body { background: var(--page); color: var(--ink); font: 15px/1.5 system-ui, sans-serif;
  max-width: 1100px; margin: 2em auto; padding: 0 1em; }
h1 { font-size: 1.5em; } h2 { font-size: 1.15em; margin-top: 2em; } h3 { font-size: 1em; margin: 1em 0 .2em; }
p, figcaption { max-width: 75ch; } .soft, figcaption { color: var(--soft); font-size: .9em; }
.scroll { overflow-x: auto; } figure { margin: .5em 0 1.5em; }
.row { display: flex; flex-wrap: wrap; gap: 0 2em; } .row svg { max-width: 100%; height: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .2em .8em; text-align: right; border-bottom: 1px solid var(--line); }
th:first-child, td:first-child, .left { text-align: left; }
td.left { white-space: nowrap; }
svg { display: block; } svg text { font: 11px system-ui, sans-serif; fill: var(--soft); }
svg text.cell { fill: var(--on-light); } svg text.strong { fill: var(--on-dark); }
.before { fill: var(--before); } .after { fill: var(--after); } .axis { stroke: var(--line); }
.keys span { white-space: nowrap; margin-right: 1.2em; } .keys .key { margin-right: .3em; }
.key { display: inline-block; width: .9em; height: .9em; vertical-align: -.1em; margin-right: .3em; }
)";

std::string escaped(const std::string& text) {
  std::string out;
  for (const char c : text) {
    switch (c) {
      case '<':
        out += "&lt;";
        break;
      case '>':
        out += "&gt;";
        break;
      case '&':
        out += "&amp;";
        break;
      case '"':
        out += "&quot;";
        break;
      default:
        out += c;
    }
  }
  return out;
}

std::string percent(double value) {
  if (!std::isfinite(value)) return std::isnan(value) ? "-" : "inf";
  return fixed(100 * value, value < 0.0995 ? 1 : 0);
}

std::string text(double x, double y, const char* anchor, const char* kind,
                 const std::string& content) {
  return "<text x=\"" + fixed(x, 1) + "\" y=\"" + fixed(y, 1) + "\" text-anchor=\"" + anchor +
         "\" class=\"" + kind + "\">" + escaped(content) + "</text>\n";
}

std::string open_svg(double width, double height, const std::string& label) {
  const std::string size[] = {fixed(width, 0), fixed(height, 0)};
  return "<svg role=\"img\" width=\"" + size[0] + "\" height=\"" + size[1] + "\" viewBox=\"0 0 " +
         size[0] + " " + size[1] + "\" aria-label=\"" + escaped(label) + "\">\n";
}

// ---- Heat maps ---------------------------------------------------------------------------------

struct Cell {
  std::string fill;   // of the colours in the style
  std::string label;  // in the cell, if it is wide enough
  std::string title;  // shown to a pointer
  bool strong;        // a colour that wants the other ink
};

size_t most_heads(const std::vector<AssessedLayer>& layers) {
  size_t most = 0;
  for (const AssessedLayer& layer : layers) most = std::max(most, layer.result.heads.size());
  return most;
}

// A row for each layer, a column for each head.
template <typename CellOf>
std::string heat_map(const std::vector<AssessedLayer>& layers, const std::string& label,
                     CellOf cell_of) {
  const size_t heads = most_heads(layers);
  const int cell_width = heads <= 12 ? 42 : heads <= 40 ? 24 : 12;
  const size_t label_step = heads <= 40 ? 1 : 8;
  std::ostringstream out;
  out << "<div class=\"scroll\">"
      << open_svg(kLabelWidth + static_cast<double>(heads) * cell_width + 1,
                  kTopHeight + static_cast<double>(layers.size()) * kCellHeight + 1, label);
  out << text(kLabelWidth - 8, 14, "end", "", "head");
  for (size_t head = 0; head < heads; head += label_step) {
    out << text(kLabelWidth + (static_cast<double>(head) + 0.5) * cell_width, 14, "middle", "",
                std::to_string(head));
  }
  double y = kTopHeight;
  for (const AssessedLayer& layer : layers) {
    out << text(kLabelWidth - 8, y + 16, "end", "", layer.name);
    double x = kLabelWidth;
    for (const HeadAssessment& head : layer.result.heads) {
      const Cell cell = cell_of(head);
      out << "<g><title>"
          << escaped(layer.name + ", head " + std::to_string(head.head) + ": " + cell.title)
          << "</title><rect x=\"" << x << "\" y=\"" << y << "\" width=\"" << cell_width - 1
          << "\" height=\"" << kCellHeight - 1 << "\" fill=\"var(--" << cell.fill << ")\"/>";
      if (cell_width > 30) {
        out << text(x + cell_width / 2.0, y + 16, "middle", cell.strong ? "strong" : "cell",
                    cell.label);
      }
      out << "</g>\n";
      x += cell_width;
    }
    y += kCellHeight;
  }
  out << "</svg></div>\n";
  return out.str();
}

int shade_of(double error, double target) {
  const double doublings = std::log2(error / target);
  return std::clamp(kShadesWithin + static_cast<int>(std::ceil(doublings)) - 1, 0, kShades - 1);
}

Cell error_cell(const VariantResult& result, double target) {
  if (!result.unsupported.empty()) return {"none", "-", result.unsupported, false};
  if (result.nonfinite > 0) {
    return {"s8", "NaN", std::to_string(result.nonfinite) + " outputs are not finite", true};
  }
  const int shade = shade_of(result.rel_error, target);
  return {"s" + std::to_string(shade), percent(result.rel_error),
          "relative error " + percent(result.rel_error) + " %, predicted " +
              percent(result.predicted) + " %, CosSim " + fixed(result.cos_sim, 5),
          shade >= 7};
}

std::string shades_key(double target) {
  std::ostringstream out;
  out << "<p class=\"soft keys\">";
  for (int shade = 0; shade < kShades; ++shade) {
    const bool last = shade == kShades - 1;
    const double limit = target * std::exp2(shade - kShadesWithin + 1 - (last ? 1 : 0));
    out << "<span><span class=\"key\" style=\"background: var(--s" << shade << ")\"></span>"
        << (last ? "above " : "up to ") << fixed(100 * limit, limit < 0.01 ? 2 : 1)
        << " %</span>\n";
  }
  out << "</p>\n";
  return out.str();
}

struct PresetColour {
  int32_t preset;
  const char *fill, *label;
  bool strong;
};
constexpr PresetColour kPresetColours[] = {
    {SAGEATTN_PRESET_SAGE2_4B, "p0", "4b", false},
    {SAGEATTN_PRESET_SAGE2_8B, "p1", "8b", false},
    {SAGEATTN_PRESET_SAGE1, "p2", "sage1", false},
    {SAGEATTN_PRESET_EXACT, "p3", "exact", true},
};

std::string presets_key() {
  std::string out = "<p class=\"soft keys\">";
  for (const PresetColour& colour : kPresetColours) {
    out += std::string("<span><span class=\"key\" style=\"background: var(--") + colour.fill +
           ")\"></span>" + colour.label + ": " + name_of(kPresets, colour.preset) + "</span>\n";
  }
  return out + "<span>v: with V smoothed</span></p>\n";
}

Cell recommendation_cell(const Recommendation& recommendation) {
  const auto* colour =
      std::find_if(std::begin(kPresetColours), std::end(kPresetColours),
                   [&](const PresetColour& one) { return one.preset == recommendation.preset; });
  return {colour->fill, colour->label + std::string(recommendation.smooth_v ? " v" : ""),
          text_of(recommendation) + ": " + recommendation.reason, colour->strong};
}

// ---- Distributions of K ------------------------------------------------------------------------

constexpr double kPlotWidth = 500, kPlotHeight = 90, kPlotBottom = 16;

std::string bar(double x, double y, double width, double height, const char* kind) {
  return "<rect x=\"" + fixed(x, 2) + "\" y=\"" + fixed(y, 2) + "\" width=\"" + fixed(width, 2) +
         "\" height=\"" + fixed(height, 2) + "\" class=\"" + kind + "\"/>";
}

// Heights are logarithmic: outliers are few.
std::string histogram_svg(const std::vector<int64_t>& counts, const Range& bins, int64_t most,
                          const char* kind) {
  std::string out = open_svg(kPlotWidth, kPlotHeight + kPlotBottom, "histogram of K");
  const double width = kPlotWidth / static_cast<double>(counts.size());
  for (size_t i = 0; i < counts.size(); ++i) {
    const double height = kPlotHeight * std::log1p(static_cast<double>(counts[i])) /
                          std::log1p(static_cast<double>(most));
    out += bar(static_cast<double>(i) * width, kPlotHeight - height, width - 1, height, kind);
  }
  out += text(0, kPlotHeight + 13, "start", "", fixed(bins.min, 1));
  out += text(kPlotWidth, kPlotHeight + 13, "end", "", fixed(bins.max, 1));
  return out + "</svg>\n";
}

// A bar from the smallest to the largest element of each channel.
std::string channels_svg(const std::vector<Range>& channels, const Range& bins, const char* kind) {
  std::string out = open_svg(kPlotWidth, kPlotHeight + kPlotBottom, "range of each channel of K");
  const double width = kPlotWidth / static_cast<double>(channels.size());
  const double span = std::max(bins.max - bins.min, 1e-30);
  const auto y_of = [&](double value) { return kPlotHeight * (bins.max - value) / span; };
  for (size_t i = 0; i < channels.size(); ++i) {
    const double top = y_of(channels[i].max);
    out += bar(static_cast<double>(i) * width, top, std::max(width - 1, 0.5),
               std::max(y_of(channels[i].min) - top, 1.0), kind);
  }
  const std::string zero = fixed(y_of(0), 1);
  out += "<line x1=\"0\" x2=\"" + fixed(kPlotWidth, 0) + "\" y1=\"" + zero + "\" y2=\"" + zero +
         "\" class=\"axis\"/>";
  out += text(0, kPlotHeight + 13, "start", "", "channel 0");
  out += text(kPlotWidth, kPlotHeight + 13, "end", "", std::to_string(channels.size() - 1));
  return out + "</svg>\n";
}

// The kv head that smoothing does most for.
const KeyDistribution& most_outlying(const LayerAssessment& layer) {
  const auto share = [&](const KeyDistribution& keys) {
    for (const HeadAssessment& head : layer.heads) {
      if (head.batch == keys.batch && head.kv_head == keys.kv_head) return head.k.mean_share;
    }
    return 0.0;
  };
  return *std::max_element(
      layer.keys.begin(), layer.keys.end(),
      [&](const auto& one, const auto& other) { return share(one) < share(other); });
}

std::string distributions(const AssessedLayer& layer) {
  const KeyDistribution& keys = most_outlying(layer.result);
  const int64_t most = std::max(*std::max_element(keys.before.begin(), keys.before.end()),
                                *std::max_element(keys.after.begin(), keys.after.end()));
  const auto figure = [](const std::string& svg, const std::string& caption) {
    return "<figure>" + svg + "<figcaption>" + caption + "</figcaption></figure>\n";
  };
  std::string out = "<h3>" + escaped(layer.name) + ", kv head " + std::to_string(keys.kv_head) +
                    "</h3>\n<div class=\"row\">\n";
  out += figure(channels_svg(keys.channels_before, keys.bins, "before"),
                "range of each channel, as given");
  out += figure(channels_svg(keys.channels_after, keys.bins, "after"), "the same, smoothed");
  out += figure(histogram_svg(keys.before, keys.bins, most, "before"), "all elements, as given");
  out += figure(histogram_svg(keys.after, keys.bins, most, "after"), "the same, smoothed");
  return out + "</div>\n";
}

// ---- Tables ------------------------------------------------------------------------------------

std::string layer_table(const std::vector<AssessedLayer>& layers) {
  std::string out = "<div class=\"scroll\"><table><tr><th>layer</th>";
  for (const AssessVariant& variant : assess_variants()) {
    out += std::string("<th>") + variant.name + "</th>";
  }
  out += "<th class=\"left\">recommended</th></tr>\n";
  for (const AssessedLayer& layer : layers) {
    out += "<tr><td>" + escaped(layer.name) + "</td>";
    for (const VariantResult& result : layer.result.variants) {
      out += "<td>" + percent(result.rel_error) + "</td>";
    }
    out += "<td class=\"left\">" + text_of(layer.result.recommendation) + " (" +
           layer.result.recommendation.reason + ")</td></tr>\n";
  }
  return out + "</table></div>\n";
}

}  // namespace

std::string text_of(const Recommendation& recommendation) {
  const std::string preset = name_of(kPresets, recommendation.preset);
  if (recommendation.smooth_v) return preset + ", smooth V";
  return preset + (smooths_v(recommendation.preset) ? ", V unsmoothed" : "");
}

std::string text_of(const AssessTarget& target) {
  std::string text;
  if (std::isfinite(target.max_rel_error)) {
    text = "a relative error of at most " + fixed(100 * target.max_rel_error, 2) + " %";
  }
  if (target.min_cos_sim > -1) {
    text +=
        (text.empty() ? "" : " and ") + ("a CosSim of at least " + fixed(target.min_cos_sim, 5));
  }
  return text;
}

std::string assess_html(const std::string& title, const std::vector<AssessedLayer>& layers,
                        const AssessTarget& target, const Recommendation& overall) {
  std::ostringstream out;
  // Without a limit of its own the error is coloured around the default one.
  const double middle =
      std::isfinite(target.max_rel_error) ? target.max_rel_error : AssessTarget().max_rel_error;
  out << "<!DOCTYPE html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n"
      << "<meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n<title>"
      << escaped(title) << "</title>\n<style>" << kStyle << "</style>\n</head>\n<body>\n<h1>"
      << escaped(title) << "</h1>\n<p>For " << text_of(target) << " in every head: <b>"
      << text_of(overall) << "</b> (" << overall.reason
      << ").</p>\n<h2>Recommendation by layer and head</h2>\n"
      << heat_map(
             layers, "recommendations",
             [](const HeadAssessment& head) { return recommendation_cell(head.recommendation); })
      << presets_key()
      << "<h2>Relative error against EXACT, in %</h2>\n<p>All heads of a layer together:</p>\n"
      << layer_table(layers) << "<p>By layer and head; blue: up to " << fixed(100 * middle, 2)
      << " %, orange: above.</p>\n"
      << shades_key(middle);
  for (size_t i = 0; i < assess_variants().size(); ++i) {
    out << "<h3>" << assess_variants()[i].name << "</h3>\n"
        << heat_map(layers, assess_variants()[i].name, [&](const HeadAssessment& head) {
             return error_cell(head.variants[i], middle);
           });
  }
  out << "<h2>K before and after smoothing</h2>\n<p class=\"soft\">Of each layer the kv head with "
         "the largest share of energy in channel means. Scales are the same before and after; "
         "heights of histograms are logarithmic.</p>\n";
  for (const AssessedLayer& layer : layers) out << distributions(layer);
  out << "</body>\n</html>\n";
  return out.str();
}

}  // namespace sageattn_cli
