#include "broker/core/sizing/model_shape.h"

#include <algorithm>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"

namespace palimpsest {
namespace {

constexpr int32_t kMostRanks = 1024;

absl::Status Indivisible(int32_t ranks, absl::string_view what, int32_t count) {
  return absl::InvalidArgumentError(absl::StrCat("tensor parallelism over ", ranks,
                                                 " ranks: ", what, " is ", count,
                                                 ", expected a multiple of ", ranks));
}

absl::Status CheckRanks(const ModelShape& model, int32_t ranks) {
  if (ranks < 1 || ranks > kMostRanks) {
    return absl::InvalidArgumentError(
        absl::StrCat("tensor parallelism: expected 1 to ", kMostRanks, " ranks, got ", ranks));
  }
  if (model.attention.heads % ranks != 0) {
    return Indivisible(ranks, "num_attention_heads", model.attention.heads);
  }
  if (model.recurrent.heads % ranks != 0) {
    return Indivisible(ranks, "heads or channels of recurrent layers", model.recurrent.heads);
  }
  return absl::OkStatus();
}

// The most groups that a rank's share of `heads` heads belongs to. Group g has heads
// g heads / groups up to the next one's first.
int64_t GroupsOfRank(int64_t heads, int64_t groups, int64_t ranks) {
  if (groups == 0) return 0;
  const int64_t per_group = heads / groups, per_rank = heads / ranks;
  int64_t most = 0;
  for (int64_t rank = 0; rank < ranks; ++rank) {
    const int64_t first = rank * per_rank, last = first + per_rank - 1;
    most = std::max(most, last / per_group - first / per_group + 1);
  }
  return most;
}

// A key and a value.
Bytes HeadTokenBytes(const AttentionShape& attention, const KvFormat& format) {
  return format.RowBytes(attention.key_dim) + format.RowBytes(attention.value_dim);
}

Bytes TokenBytes(const AttentionShape& attention, const ShardOptions& options) {
  const KvFormat& format = options.format;
  const Bytes index = format.RowBytes(attention.index_dim);
  if (attention.latent_dim > 0) return format.RowBytes(attention.latent_dim) + index;
  const Bytes head = HeadTokenBytes(attention, format);
  return head * GroupsOfRank(attention.heads, attention.kv_heads, options.ranks) + index;
}

Bytes StateBytes(const RecurrentShape& recurrent, int32_t ranks) {
  const int64_t heads = recurrent.heads / ranks;
  const int64_t groups = GroupsOfRank(recurrent.heads, recurrent.groups, ranks);
  const int64_t conv = heads * recurrent.conv_per_head + groups * recurrent.conv_per_group;
  return Bytes(heads * recurrent.state_per_head * recurrent.state_bytes +
               conv * recurrent.conv_bytes);
}

}  // namespace

absl::StatusOr<std::vector<KvGroup>> KvGroups(const ModelShape& model,
                                              const ShardOptions& options) {
  if (absl::Status status = CheckRanks(model, options.ranks); !status.ok()) return status;
  std::vector<LayerShape> kinds;
  std::vector<KvGroup> groups;
  for (const LayerShape& layer : model.layers) {
    if (!layer.attention && !layer.recurrent) continue;
    const auto found = std::find(kinds.begin(), kinds.end(), layer);
    const auto index = static_cast<size_t>(found - kinds.begin());
    if (found == kinds.end()) {
      kinds.push_back(layer);
      KvGroup& group = groups.emplace_back();
      group.reach = layer.reach;
      if (layer.attention) group.token_bytes = TokenBytes(model.attention, options);
      if (layer.recurrent) group.state_bytes = StateBytes(model.recurrent, options.ranks);
    }
    ++groups[index].layers;
  }
  return groups;
}

absl::StatusOr<std::vector<KvGroup>> MultiHeadGroups(const ModelShape& model,
                                                     const ShardOptions& options) {
  if (absl::Status status = CheckRanks(model, options.ranks); !status.ok()) return status;
  const AttentionShape& attention = model.attention;
  const KvFormat unscaled = {.bits = options.format.bits};
  KvGroup group;
  group.layers = static_cast<int32_t>(model.layers.size());
  group.token_bytes = attention.heads > 0
                          ? HeadTokenBytes(attention, unscaled) * (attention.heads / options.ranks)
                          : unscaled.RowBytes(model.hidden_size) * 2 / options.ranks;
  return std::vector<KvGroup>{group};
}

}  // namespace palimpsest
