// What a file of a directory tier begins with: everything that is known of the block, and who wrote
// it. The block's bytes follow. Little-endian, padded to whole pages, under a checksum of its own.
#ifndef PALIMPSEST_BROKER_TIER_DIRECTORY_BLOCK_FILE_H_
#define PALIMPSEST_BROKER_TIER_DIRECTORY_BLOCK_FILE_H_

#include <cstddef>
#include <cstdint>
#include <string>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "broker/tier/block_record.h"

namespace palimpsest {

inline constexpr size_t kBlockFilePage = 4096;
inline constexpr size_t kMaxBlockFileHeader = 6 * kBlockFilePage;
inline constexpr size_t kMaxNodeName = 64;

struct BlockFileHeader {
  BlockRecord record;
  // Who wrote it, and alone may remove it.
  std::string node;
  // The tenant's generation when it was written; a purge begins a new one.
  uint64_t generation = 0;

  friend bool operator==(const BlockFileHeader&, const BlockFileHeader&) = default;
};

// Requires what block_record.h says of sizes, and a node's name of 1 to kMaxNodeName bytes.
std::string EncodeBlockFileHeader(const BlockFileHeader& header);

// How many bytes the header has, told by its first page: kBlockFilePage .. kMaxBlockFileHeader.
// DataLoss if that is no first page.
absl::StatusOr<size_t> BlockFileHeaderSize(absl::Span<const std::byte> first_page);

// DataLoss unless it is exactly what EncodeBlockFileHeader makes of something.
absl::StatusOr<BlockFileHeader> DecodeBlockFileHeader(absl::Span<const std::byte> header);

}  // namespace palimpsest

#endif  // PALIMPSEST_BROKER_TIER_DIRECTORY_BLOCK_FILE_H_
