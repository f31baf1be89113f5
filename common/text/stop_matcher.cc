#include "common/text/stop_matcher.h"

#include <algorithm>

namespace palimpsest {
namespace {

std::vector<uint32_t> Borders(absl::string_view text) {
  std::vector<uint32_t> border(text.size());
  for (uint32_t i = 1, length = 0; i < text.size(); ++i) {
    while (length > 0 && text[i] != text[length]) length = border[length - 1];
    if (text[i] == text[length]) ++length;
    border[i] = length;
  }
  return border;
}

}  // namespace

StopMatcher::StopMatcher(const std::vector<std::string>& stops) {
  for (size_t i = 0; i < stops.size(); ++i) {
    if (!stops[i].empty()) patterns_.push_back({i, stops[i], Borders(stops[i])});
  }
}

const std::optional<StopMatcher::Match>& StopMatcher::Push(absl::string_view bytes) {
  if (match_) return match_;
  if (patterns_.empty()) {
    pushed_ += bytes.size();
    return match_;
  }
  for (const char byte : bytes) {
    ++pushed_;
    held_ = 0;
    for (Pattern& pattern : patterns_) {
      uint32_t& matched = pattern.matched;
      while (matched > 0 && pattern.text[matched] != byte) matched = pattern.border[matched - 1];
      if (pattern.text[matched] == byte) ++matched;
      held_ = std::max<uint64_t>(held_, matched);
      if (matched < pattern.text.size()) continue;
      if (!match_ || pushed_ - matched < match_->start) {
        match_ = {pattern.index, pushed_ - matched, pushed_};
      }
    }
    if (match_) break;
  }
  return match_;
}

}  // namespace palimpsest
