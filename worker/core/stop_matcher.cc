#include "worker/core/stop_matcher.h"

#include <algorithm>

namespace palimpsest {

StopMatcher::StopMatcher(const std::vector<std::string>* stops) : stops_(stops) {
  for (const std::string& stop : *stops_) longest_ = std::max(longest_, stop.size());
}

std::optional<size_t> StopMatcher::Append(absl::string_view bytes) {
  if (longest_ == 0 || bytes.empty()) return std::nullopt;
  const size_t old = tail_.size();
  tail_.append(bytes.data(), bytes.size());
  size_t first = std::string::npos;
  for (const std::string& stop : *stops_) {
    // A match that ends before the new bytes would have been found earlier.
    const size_t from = old + 1 > stop.size() ? old + 1 - stop.size() : 0;
    first = std::min(first, tail_.find(stop, from));
  }
  if (first != std::string::npos) return tail_.size() - first;
  if (tail_.size() >= longest_) tail_.erase(0, tail_.size() - (longest_ - 1));
  return std::nullopt;
}

}  // namespace palimpsest
