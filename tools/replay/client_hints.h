// What clients could say of their requests, made from a trace's own future: hints that are always
// right, an upper bound for what real ones are worth.
#ifndef PALIMPSEST_TOOLS_REPLAY_CLIENT_HINTS_H_
#define PALIMPSEST_TOOLS_REPLAY_CLIENT_HINTS_H_

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/time/time.h"
#include "tools/replay/trace.h"

namespace palimpsest::replay {

enum class Hints {
  kNone,
  kLastTurn,         // whether nobody will go on from the request
  kLastTurnAndIdle,  // and when somebody will
};

// What the command line calls them.
const std::vector<std::pair<std::string, Hints>>& HintNames();

struct ClientHint {
  bool last_turn = false;
  std::optional<absl::Duration> expected_idle;

  friend bool operator==(const ClientHint&, const ClientHint&) = default;
};

// One for each request. A later request goes on from one if it repeats its path but for the last
// two blocks at most: the one that was cut in the middle, and the end of the answer before, which
// templates rewrite.
std::vector<ClientHint> HintsFromTheFuture(const Trace& trace, Hints hints);

}  // namespace palimpsest::replay

#endif  // PALIMPSEST_TOOLS_REPLAY_CLIENT_HINTS_H_
