#include "tools/replay/client_hints.h"

#include <algorithm>

namespace palimpsest::replay {
namespace {

constexpr size_t kSlack = 2;

}  // namespace

const std::vector<std::pair<std::string, Hints>>& HintNames() {
  static const auto* const names = new std::vector<std::pair<std::string, Hints>>{
      {"none", Hints::kNone}, {"last-turn", Hints::kLastTurn}, {"idle", Hints::kLastTurnAndIdle}};
  return *names;
}

std::vector<ClientHint> HintsFromTheFuture(const Trace& trace, Hints hints) {
  std::vector<ClientHint> all(trace.requests().size());
  if (hints == Hints::kNone) return all;
  std::vector<size_t> next(trace.distinct_blocks(), all.size());  // by block: who uses it next
  for (size_t i = all.size(); i > 0; --i) {
    const absl::Span<const uint32_t> path = trace.path(i - 1);
    if (path.empty()) continue;
    const size_t last = path.size() - 1;
    const size_t later = next[path[last - std::min(kSlack, last)]];
    all[i - 1].last_turn = later == all.size();
    if (hints == Hints::kLastTurnAndIdle && later < all.size()) {
      all[i - 1].expected_idle = trace.requests()[later].arrival - trace.requests()[i - 1].arrival;
    }
    for (const uint32_t block : path) next[block] = i - 1;
  }
  return all;
}

}  // namespace palimpsest::replay
