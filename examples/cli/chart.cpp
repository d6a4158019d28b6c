#include "chart.h"

#include <algorithm>
#include <cmath>
#include <iterator>
#include <set>
#include <sstream>

#include "table.h"

namespace sageattn_cli {
namespace {

constexpr const char* kColours[] = {"#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#ff7f0e",
                                    "#17becf", "#8c564b", "#e377c2", "#7f7f7f", "#bcbd22"};
constexpr double kLeft = 70, kTop = 50, kPlotWidth = 640, kPlotHeight = 400;
constexpr double kLegendLeft = kLeft + kPlotWidth + 20, kLegendWidth = 380, kLegendStep = 20;
constexpr int kMostTicks = 8;

std::string escaped(const std::string& text) {
  std::string result;
  for (const char c : text) {
    result += c == '&' ? "&amp;" : c == '<' ? "&lt;" : c == '>' ? "&gt;" : std::string(1, c);
  }
  return result;
}

std::string label(double x, double y, const char* anchor, const std::string& content) {
  return "<text x=\"" + fixed(x, 1) + "\" y=\"" + fixed(y, 1) + "\" text-anchor=\"" + anchor +
         "\">" + escaped(content) + "</text>\n";
}

std::string rule(double x1, double y1, double x2, double y2, const std::string& style) {
  return "<line x1=\"" + fixed(x1, 1) + "\" y1=\"" + fixed(y1, 1) + "\" x2=\"" + fixed(x2, 1) +
         "\" y2=\"" + fixed(y2, 1) + "\" " + style + "/>\n";
}

std::string colour(const Line& line) {
  return kColours[static_cast<size_t>(line.colour) % std::size(kColours)];
}

std::string stroke(const Line& line) {
  return "stroke=\"" + colour(line) + "\" stroke-width=\"2\"" +
         (line.dashed ? " stroke-dasharray=\"7 4\"" : "");
}

// 1, 2 or 5 times a power of ten.
double tick_step(double highest) {
  const double power = std::pow(10, std::floor(std::log10(highest / kMostTicks)));
  for (const double factor : {1, 2, 5}) {
    if (highest <= kMostTicks * factor * power) return factor * power;
  }
  return 10 * power;
}

class Axes {
 public:
  explicit Axes(const Chart& chart) {
    double highest = 0;
    for (const Line& line : chart.lines) {
      for (const auto& [x, y] : line.points) {
        xs_.insert(x);
        highest = std::max(highest, y);
      }
    }
    step_ = tick_step(highest > 0 ? highest : 1);
    top_ = std::max(1.0, std::ceil(highest / step_)) * step_;
  }

  double x(double value) const {
    const double low = std::log2(*xs_.begin()), high = std::log2(*xs_.rbegin());
    const double share = high > low ? (std::log2(value) - low) / (high - low) : 0.5;
    return kLeft + share * kPlotWidth;
  }
  double y(double value) const { return kTop + (1 - value / top_) * kPlotHeight; }

  std::string draw() const {
    const std::string grid = "stroke=\"#ddd\"";
    const int digits = std::max(0, static_cast<int>(-std::floor(std::log10(step_))));
    std::string svg;
    for (int i = 0; i * step_ <= top_ * 1.0001; ++i) {
      const double at = y(i * step_);
      svg += rule(kLeft, at, kLeft + kPlotWidth, at, grid);
      svg += label(kLeft - 8, at + 4, "end", fixed(i * step_, digits));
    }
    for (const double value : xs_) {
      svg += rule(x(value), kTop, x(value), kTop + kPlotHeight, grid);
      svg += label(x(value), kTop + kPlotHeight + 20, "middle", fixed(value, 0));
    }
    return svg;
  }

 private:
  std::set<double> xs_;
  double step_, top_;
};

std::string draw(const Line& line, const Axes& axes) {
  std::string points, dots;
  for (const auto& [x, y] : line.points) {
    const std::string px = fixed(axes.x(x), 1), py = fixed(axes.y(y), 1);
    points += (points.empty() ? "" : " ") + px + "," + py;
    dots += "<circle cx=\"" + px + "\" cy=\"" + py + "\" r=\"3\" fill=\"" + colour(line) + "\"/>\n";
  }
  return "<polyline points=\"" + points + "\" " + stroke(line) + "/>\n" + dots;
}

}  // namespace

std::string svg(const Chart& chart) {
  const double legend = kLegendStep * static_cast<double>(chart.lines.size());
  const double height = kTop + std::max(kPlotHeight, legend) + 60;
  const std::string width = fixed(kLegendLeft + kLegendWidth, 0);
  std::ostringstream out;
  out << "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"" << width << "\" height=\""
      << fixed(height, 0) << "\" viewBox=\"0 0 " << width << ' ' << fixed(height, 0)
      << "\" font-family=\"sans-serif\" font-size=\"12\" fill=\"#222\">\n"
      << "<rect width=\"100%\" height=\"100%\" fill=\"#fff\"/>\n"
      << label(kLeft, 24, "start", chart.title) << label(kLeft, kTop - 8, "start", chart.y_title)
      << label(kLeft + kPlotWidth / 2, kTop + kPlotHeight + 44, "middle", chart.x_title);
  const Axes axes(chart);
  out << axes.draw() << "<g fill=\"none\">\n";
  for (const Line& line : chart.lines) out << draw(line, axes);
  double at = kTop + 10;
  for (const Line& line : chart.lines) {
    out << rule(kLegendLeft, at, kLegendLeft + 30, at, stroke(line));
    at += kLegendStep;
  }
  out << "</g>\n";
  at = kTop + 14;
  for (const Line& line : chart.lines) {
    out << label(kLegendLeft + 38, at, "start", line.label);
    at += kLegendStep;
  }
  out << "</svg>\n";
  return out.str();
}

}  // namespace sageattn_cli
