#include "tools/palctl/text_table.h"

#include <algorithm>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"

namespace palimpsest::palctl {

TextTable::TextTable(const std::vector<std::string>& titles) {
  std::vector<std::string> row;
  for (const std::string& title : titles) {
    right_.push_back(!title.empty() && title.front() == '>');
    row.push_back(right_.back() ? title.substr(1) : title);
  }
  rows_.push_back(std::move(row));
}

void TextTable::AddRow(std::vector<std::string> cells) {
  cells.resize(right_.size());
  rows_.push_back(std::move(cells));
}

std::string TextTable::ToString() const {
  std::vector<size_t> widths(right_.size(), 0);
  for (const std::vector<std::string>& row : rows_) {
    for (size_t i = 0; i < row.size(); ++i) widths[i] = std::max(widths[i], row[i].size());
  }
  std::string text;
  for (const std::vector<std::string>& row : rows_) {
    std::string line;
    for (size_t i = 0; i < row.size(); ++i) {
      const std::string padding(widths[i] - row[i].size(), ' ');
      absl::StrAppend(&line, i == 0 ? "" : "  ", right_[i] ? padding : "", row[i],
                      right_[i] ? "" : padding);
    }
    absl::StripTrailingAsciiWhitespace(&line);
    absl::StrAppend(&text, line, "\n");
  }
  return text;
}

}  // namespace palimpsest::palctl
