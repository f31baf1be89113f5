#include "worker/core/head_parts.h"

#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "worker/core/block_keys.h"

namespace palimpsest {

absl::StatusOr<HeadParts> HeadParts::Create(const HeadPartsShape& shape,
                                            std::vector<std::vector<int32_t>> groups) {
  if (shape.layers < 1 || shape.kv_heads < 1 || shape.block_tokens < 1 || shape.row <= Bytes(0)) {
    return absl::InvalidArgumentError(absl::StrCat(
        "parts of heads: expected layers, KV heads, tokens and bytes above 0, got ", shape.layers,
        ", ", shape.kv_heads, ", ", shape.block_tokens, " and ", shape.row.count()));
  }
  const auto heads = static_cast<size_t>(shape.layers) * static_cast<size_t>(shape.kv_heads);
  std::vector<bool> seen(heads, false);
  size_t count = 0;
  for (const std::vector<int32_t>& group : groups) {
    for (const int32_t head : group) {
      const auto number = static_cast<size_t>(head);
      if (head < 0 || number >= heads || seen[number]) {
        return absl::InvalidArgumentError(
            absl::StrCat("parts of heads: expected each of ", heads, " heads once, got ", head));
      }
      seen[number] = true;
      ++count;
    }
    if (group.size() != groups.front().size()) {
      return absl::InvalidArgumentError(absl::StrCat(
          "parts of heads: expected groups of one size, got ", groups.front().size(), " and ",
          group.size(), " heads; choose a number of groups that divides ", heads));
    }
  }
  if (count != heads) {
    return absl::InvalidArgumentError(
        absl::StrCat("parts of heads: expected all ", heads, " heads, got ", count));
  }
  return HeadParts(shape, std::move(groups));
}

HeadParts::HeadParts(const HeadPartsShape& shape, std::vector<std::vector<int32_t>> groups)
    : shape_(shape), groups_(std::move(groups)) {}

Bytes HeadParts::part_bytes() const {
  return shape_.row * (int64_t{2} * shape_.block_tokens) *
         static_cast<int64_t>(groups_.front().size());
}

template <typename Copy>
void HeadParts::ForEachRow(int32_t group, const Copy& copy) const {
  const auto row = static_cast<size_t>(shape_.row.count());
  size_t part = 0;
  for (const int32_t head : groups_[static_cast<size_t>(group)]) {
    const int64_t layer = head / shape_.kv_heads, in_layer = head % shape_.kv_heads;
    for (int64_t plane = 2 * layer; plane < 2 * layer + 2; ++plane) {
      for (int64_t token = 0; token < shape_.block_tokens; ++token, part += row) {
        const int64_t place = (plane * shape_.block_tokens + token) * shape_.kv_heads + in_layer;
        copy(static_cast<size_t>(place) * row, part);
      }
    }
  }
}

void HeadParts::Take(const std::byte* block, int32_t group, std::byte* part) const {
  const auto row = static_cast<size_t>(shape_.row.count());
  ForEachRow(group, [&](size_t in_block, size_t in_part) {
    std::memcpy(part + in_part, block + in_block, row);
  });
}

void HeadParts::Put(const std::byte* part, int32_t group, std::byte* block) const {
  const auto row = static_cast<size_t>(shape_.row.count());
  ForEachRow(group, [&](size_t in_block, size_t in_part) {
    std::memcpy(block + in_block, part + in_part, row);
  });
}

BlockKey HeadParts::KeyOf(const BlockKey& block, int32_t group) {
  const TokenId name = group;
  return ChainKey(block, {&name, 1});
}

}  // namespace palimpsest
