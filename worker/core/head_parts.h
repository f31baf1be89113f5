// How a KV block is taken apart by groups of KV heads and put together again. Pure.
//
// A block lies as [layer][keys, values][token][KV head][numbers]; the part of a group holds, for
// each of its heads in turn, [keys, values][token][numbers]. Every byte of a block is in exactly
// one part.
#ifndef PALIMPSEST_WORKER_CORE_HEAD_PARTS_H_
#define PALIMPSEST_WORKER_CORE_HEAD_PARTS_H_

#include <cstddef>
#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "common/block_key.h"
#include "common/bytes.h"

namespace palimpsest {

struct HeadPartsShape {
  int32_t layers = 0;
  int32_t kv_heads = 0;  // of a layer
  int32_t block_tokens = 0;
  Bytes row;  // the key of one token and head, and its value
};

class HeadParts {
 public:
  // `groups`: heads by number, layer * kv_heads + KV head, as GroupHeads has them. InvalidArgument
  // unless each head is in exactly one group and all groups have the same size.
  static absl::StatusOr<HeadParts> Create(const HeadPartsShape& shape,
                                          std::vector<std::vector<int32_t>> groups);

  int32_t count() const { return static_cast<int32_t>(groups_.size()); }
  Bytes part_bytes() const;
  Bytes block_bytes() const { return part_bytes() * count(); }

  // Block to part, part to block.
  void Take(const std::byte* block, int32_t group, std::byte* part) const;
  void Put(const std::byte* part, int32_t group, std::byte* block) const;

  // The name of a block's part, by the block's.
  static BlockKey KeyOf(const BlockKey& block, int32_t group);

 private:
  HeadParts(const HeadPartsShape& shape, std::vector<std::vector<int32_t>> groups);

  // Calls copy(offset in the block, offset in the part) for each row of the group.
  template <typename Copy>
  void ForEachRow(int32_t group, const Copy& copy) const;

  HeadPartsShape shape_;
  std::vector<std::vector<int32_t>> groups_;
};

}  // namespace palimpsest

#endif  // PALIMPSEST_WORKER_CORE_HEAD_PARTS_H_
