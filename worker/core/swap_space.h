// Which places of a worker's swap arena in host memory hold KV blocks. Pure bookkeeping: what lies
// in them is moved by a SwapCopier.
//
// A slot is free or referenced: by the sequence whose KV it holds, and by each copy under way to or
// from it, so that neither has to ask whether the other is done.
//
// Not thread-safe. Does not block.
#ifndef PALIMPSEST_WORKER_CORE_SWAP_SPACE_H_
#define PALIMPSEST_WORKER_CORE_SWAP_SPACE_H_

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "worker/core/swap_copier.h"

namespace palimpsest {

class SwapSpace {
 public:
  explicit SwapSpace(int32_t slots);

  // All or nothing: so many slots with one reference each, ascending, the lowest that are free, so
  // that neighbours are copied together.
  std::optional<std::vector<SwapSlot>> Allocate(int32_t count);
  // Requires a referenced slot.
  void AddReference(SwapSlot slot);
  void Release(SwapSlot slot);

  int32_t slots() const { return static_cast<int32_t>(references_.size()); }
  int32_t free() const { return free_; }
  int32_t used() const { return slots() - free_; }
  int32_t references(SwapSlot slot) const { return references_[slot.value()]; }

  // Aborts if a count is wrong.
  void CheckInvariants() const;

 private:
  std::vector<int32_t> references_;
  int32_t free_;
  size_t first_free_ = 0;  // no slot before it is free
};

}  // namespace palimpsest

#endif  // PALIMPSEST_WORKER_CORE_SWAP_SPACE_H_
