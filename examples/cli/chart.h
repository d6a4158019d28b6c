// A line chart as SVG that needs nothing from outside.
#pragma once

#include <string>
#include <utility>
#include <vector>

namespace sageattn_cli {

struct Line {
  std::string label;
  int colour;  // lines of one number have one colour
  bool dashed;
  std::vector<std::pair<double, double>> points;  // x ascending and above 0, y not negative
};

struct Chart {
  std::string title, x_title, y_title;
  std::vector<Line> lines;
};

// x is logarithmic, with a tick at each x of a point; y begins at 0.
std::string svg(const Chart& chart);

}  // namespace sageattn_cli
