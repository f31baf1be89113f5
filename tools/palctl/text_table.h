// A table for terminals: columns as wide as their widest cell, numbers flush right.
#ifndef PALIMPSEST_TOOLS_PALCTL_TEXT_TABLE_H_
#define PALIMPSEST_TOOLS_PALCTL_TEXT_TABLE_H_

#include <string>
#include <vector>

namespace palimpsest::palctl {

class TextTable {
 public:
  // A title that begins with '>' makes its column flush right.
  explicit TextTable(const std::vector<std::string>& titles);

  // One cell per column.
  void AddRow(std::vector<std::string> cells);

  // Lines ending in '\n', without trailing spaces; the titles come first.
  std::string ToString() const;

 private:
  std::vector<bool> right_;
  std::vector<std::vector<std::string>> rows_;
};

}  // namespace palimpsest::palctl

#endif  // PALIMPSEST_TOOLS_PALCTL_TEXT_TABLE_H_
