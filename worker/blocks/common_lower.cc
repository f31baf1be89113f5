#include "worker/blocks/common_lower.h"

#include <algorithm>
#include <cstdint>
#include <limits>

namespace palimpsest {
namespace {

// What one group has behind the blocks that all have, from here on.
class Cursor {
 public:
  Cursor(const AcquireAnswer& answer, size_t common) : runs_(answer.lower) {
    const auto more = static_cast<int32_t>(answer.blocks.size() - common);
    if (more > 0) runs_.insert(runs_.begin(), {.blocks = more, .expected_seconds = 0});
  }

  // How many blocks in a row cost the same; 0: there are no more.
  int32_t run() const { return at_ < runs_.size() ? runs_[at_].blocks : 0; }
  double seconds() const { return runs_[at_].expected_seconds; }
  void Skip(int32_t blocks) {
    runs_[at_].blocks -= blocks;
    if (runs_[at_].blocks == 0) ++at_;
  }

 private:
  std::vector<LowerBlocks> runs_;
  size_t at_ = 0;
};

}  // namespace

std::vector<LowerBlocks> LowerOfAll(absl::Span<const AcquireAnswer* const> answers, size_t common) {
  std::vector<Cursor> cursors;
  for (const AcquireAnswer* answer : answers) cursors.emplace_back(*answer, common);
  std::vector<LowerBlocks> lower;
  while (true) {
    int32_t blocks = std::numeric_limits<int32_t>::max();
    for (const Cursor& cursor : cursors) blocks = std::min(blocks, cursor.run());
    if (blocks == 0) return lower;
    double seconds = 0;
    for (Cursor& cursor : cursors) {
      seconds = std::max(seconds, cursor.seconds());
      cursor.Skip(blocks);
    }
    lower.push_back({.blocks = blocks, .expected_seconds = seconds});
  }
}

}  // namespace palimpsest
