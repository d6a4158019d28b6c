// Plain text tables.
#pragma once

#include <iosfwd>
#include <string>
#include <vector>

namespace sageattn_cli {

class Table {
 public:
  enum class Align { kLeft, kRight };
  struct Column {
    std::string title;
    Align align = Align::kRight;
  };

  explicit Table(std::vector<Column> columns) : columns_(std::move(columns)) {}

  // As many cells as there are columns.
  void add_row(std::vector<std::string> cells) { rows_.push_back(std::move(cells)); }
  void print(std::ostream& stream) const;

 private:
  std::vector<Column> columns_;
  std::vector<std::vector<std::string>> rows_;
};

std::string fixed(double value, int digits);
std::string scientific(double value);  // four significant digits

}  // namespace sageattn_cli
