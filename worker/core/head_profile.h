// The attention mass of a model's KV heads as a file says it: measured once (`palctl bench heads`),
// then the same for every worker that is given the file. And what is decided by it.
//
// Text in JSON: {"layers", "kv_heads", "recent_tokens", "samples", "mass", "effect"}; the last two
// have one number from 0 to 1 for each head, number layer * kv_heads + KV head: averages of
// HeadSample's shares and effects. Pure.
#ifndef PALIMPSEST_WORKER_CORE_HEAD_PROFILE_H_
#define PALIMPSEST_WORKER_CORE_HEAD_PROFILE_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "common/bytes.h"
#include "worker/core/head_mass.h"

namespace palimpsest {

struct HeadProfile {
  int32_t layers = 0;
  int32_t kv_heads = 0;  // of a layer
  int32_t recent_tokens = 0;
  int64_t samples = 0;
  std::vector<float> mass;
  std::vector<float> effect;

  // InvalidArgument names the field.
  static absl::StatusOr<HeadProfile> Parse(absl::string_view json);
  static HeadProfile Of(const HeadMass& mass, const HeadMass& effect, int32_t layers,
                        int32_t recent_tokens);
  std::string ToJson() const;
  // FailedPrecondition if it was measured on a model of another shape.
  absl::Status CheckModel(int32_t model_layers, int32_t model_kv_heads) const;
};

// Lossy: tokens see no far keys (far_keys.h) of these heads. It changes what the model says.
struct LossyHeads {
  int32_t recent_tokens = 0;
  std::vector<uint8_t> dropped;  // one for each head, not 0: dropped; empty: nothing is lossy

  bool any() const { return !dropped.empty(); }
  int32_t count() const;
  // Of a sequence of `tokens` tokens: what the far keys and values of the dropped heads take, whole
  // blocks alone. `head_bytes`: of one head in a block.
  Bytes FreedBytes(int32_t tokens, int32_t block_tokens, Bytes head_bytes) const;
};

// Drops the heads of least effect, all but the share `keep` of them, rounded to whole heads; equal
// ones by number. Mass does not do: heads of early layers spread theirs over everything and lose
// little without far keys, while late ones look at few of them now and then (docs/benchmarks.md).
// InvalidArgument unless keep is from 0 to 1.
absl::StatusOr<LossyHeads> ChooseLossyHeads(const HeadProfile& profile, double keep);

}  // namespace palimpsest

#endif  // PALIMPSEST_WORKER_CORE_HEAD_PROFILE_H_
