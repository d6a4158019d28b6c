#include "table.h"

#include <algorithm>
#include <cstdio>
#include <ostream>

namespace sageattn_cli {
namespace {

constexpr const char* kGap = "  ";

std::string padded(const std::string& text, size_t width, Table::Align align) {
  const std::string padding(width - text.size(), ' ');
  return align == Table::Align::kLeft ? text + padding : padding + text;
}

void print_line(std::ostream& stream, std::string line) {
  line.erase(line.find_last_not_of(' ') + 1);
  stream << line << '\n';
}

}  // namespace

void Table::print(std::ostream& stream) const {
  std::vector<size_t> widths;
  for (const Column& column : columns_) widths.push_back(column.title.size());
  for (const auto& row : rows_) {
    for (size_t i = 0; i < row.size(); ++i) widths[i] = std::max(widths[i], row[i].size());
  }
  const auto line_of = [&](auto cell) {
    std::string line;
    for (size_t i = 0; i < columns_.size(); ++i) {
      line += (i ? kGap : "") + padded(cell(i), widths[i], columns_[i].align);
    }
    return line;
  };
  print_line(stream, line_of([&](size_t i) { return columns_[i].title; }));
  print_line(stream, line_of([&](size_t i) { return std::string(widths[i], '-'); }));
  for (const auto& row : rows_) print_line(stream, line_of([&](size_t i) { return row[i]; }));
}

std::string fixed(double value, int digits) {
  char text[64];
  std::snprintf(text, sizeof text, "%.*f", digits, value);
  return text;
}

std::string scientific(double value) {
  char text[64];
  std::snprintf(text, sizeof text, "%.3e", value);
  return text;
}

}  // namespace sageattn_cli
