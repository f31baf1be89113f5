// Which KV heads matter for tokens that are long past, and which parts of idle blocks leave T0
// first. Pure; one thread at a time. Lossless: what leaves comes back before its block is used.
//
// Attention weights of a query sum to one, so what tells heads apart is where they fall. Some heads
// look back over the whole context, others at the last tokens alone (Xiao et al., DuoAttention,
// arXiv:2410.10819). A sample is the share of a step's weights that each KV head's queries gave to
// far keys (far_keys.h); the mass m of a head is its exponential average. What the KV of a head is
// worth in a block that has been idle for t and lies d tokens behind its sequence's end:
//
//   m * 2^(-t / recency_half_life) / (1 + d / distance_scale)
//
// The order of two such worths does not change while both blocks stay idle.
//
// A model with latent attention has one vector for all heads and thus nothing to divide: see
// KvHeadBytes (broker/core/sizing/model_shape.h), which refuses it and says what a head's part is.
#ifndef PALIMPSEST_WORKER_CORE_HEAD_MASS_H_
#define PALIMPSEST_WORKER_CORE_HEAD_MASS_H_

#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "common/bytes.h"

namespace palimpsest {

struct HeadMassOptions {
  int32_t layers = 0;
  int32_t kv_heads = 0;         // of a layer on this rank
  double sample_weight = 0.05;  // of a new sample in the average, above 0 and at most 1
  absl::Duration recency_half_life = absl::Minutes(1);
  double distance_scale = 4096;  // tokens
};

// A head is numbered layer * kv_heads + KV head.
class HeadMass {
 public:
  // InvalidArgument names the option.
  static absl::StatusOr<HeadMass> Create(const HeadMassOptions& options);

  // `shares`: one for each head, from 0 to 1. A sample of another size or with other numbers (NaN
  // among them) is refused as a whole, InvalidArgument, and changes nothing.
  absl::Status Sample(absl::Span<const float> shares);

  int32_t heads() const { return static_cast<int32_t>(mass_.size()); }
  int64_t samples() const { return samples_; }
  // 0 before the first sample.
  double mass(int32_t head) const { return mass_[static_cast<size_t>(head)]; }

  // Least mass first; equal ones by number.
  std::vector<int32_t> Ranking() const;

  // Logarithm to base 2 of the worth of mass `mass`. Masses below 2^-40 count as that, so that
  // recency and distance still order what has none.
  double LogWorth(double mass, absl::Duration idle, int64_t distance) const;

 private:
  explicit HeadMass(const HeadMassOptions& options);

  HeadMassOptions options_;
  std::vector<double> mass_;
  int64_t samples_ = 0;
};

// A division of a model's heads into groups of which each is one extent of a repacked block. A
// block keeps the division that it was packed by.
class HeadGroups {
 public:
  static constexpr int32_t kMost = 64;

  // `count` groups of heads that are neighbours in the ranking, the one of least mass first; sizes
  // differ by one head at most. InvalidArgument unless count is 1 to kMost and at most the number
  // of heads. `head_bytes`: KvHeadBytes, the KV of one head in a block.
  static absl::StatusOr<HeadGroups> Create(const HeadMass& mass, int32_t count, Bytes head_bytes);

  int32_t count() const { return static_cast<int32_t>(members_.size()); }
  const std::vector<int32_t>& members(int32_t group) const {
    return members_[static_cast<size_t>(group)];
  }
  // Of the group's extent.
  Bytes ExtentBytes(int32_t group) const;
  // Of a whole block.
  Bytes BlockBytes() const;
  // Of the extents whose bit is not set in `resident`: what must come back before use.
  Bytes MissingBytes(uint64_t resident) const;

 private:
  HeadGroups(std::vector<std::vector<int32_t>> members, Bytes head_bytes);

  std::vector<std::vector<int32_t>> members_;
  Bytes head_bytes_;
};

struct IdleBlock {
  absl::Duration idle;
  int64_t distance = 0;   // tokens between its end and its sequence's
  uint64_t resident = 0;  // bit g: the extent of group g is in T0
};

struct HeadMove {
  size_t block = 0;  // index
  int32_t group = 0;
  Bytes bytes;

  friend bool operator==(const HeadMove&, const HeadMove&) = default;
};

// Which extents leave T0 so that `wanted` bytes become free: those that are worth least (the mean
// over an extent's heads, hence per byte), as few as suffice, in that order; equal ones by block
// and group. All of them if they do not suffice.
std::vector<HeadMove> ChooseHeadMoves(const HeadMass& mass, const HeadGroups& groups,
                                      absl::Span<const IdleBlock> blocks, Bytes wanted);

}  // namespace palimpsest

#endif  // PALIMPSEST_WORKER_CORE_HEAD_MASS_H_
