#include "broker/tier/nvme/area_replay.h"

#include <algorithm>
#include <string>
#include <utility>

#include "absl/container/btree_map.h"
#include "absl/strings/str_cat.h"

namespace palimpsest {
namespace {

using Blocks = absl::btree_map<uint64_t, BlockRecord>;

void Apply(Change change, Blocks& blocks) {
  switch (change.kind) {
    case Change::Kind::kPut:
      blocks.insert_or_assign(change.place, std::move(change.record));
      break;
    case Change::Kind::kRemove:
      if (const auto it = blocks.find(change.place);
          it != blocks.end() && it->second.id.key == change.record.id.key) {
        blocks.erase(it);
      }
      break;
    case Change::Kind::kPurge:
      for (auto it = blocks.begin(); it != blocks.end();) {
        it = it->second.id.tenant == change.tenant ? blocks.erase(it) : std::next(it);
      }
      break;
  }
}

absl::Status Damaged(uint64_t position, absl::string_view what) {
  return absl::DataLossError(
      absl::StrCat("metadata of the NVMe tier is damaged at unit ", position, ": ", what));
}

absl::Status CheckExtents(const Blocks& blocks, uint64_t data_units) {
  uint64_t end = 0;
  for (const auto& [place, record] : blocks) {
    const uint64_t units = CeilDiv(record.length, kIoUnit);
    if (place < end) return Damaged(place, "two blocks overlap");
    if (place > data_units || units > data_units - place) {
      return Damaged(place, "a block reaches over the end of the device");
    }
    end = place + units;
  }
  return absl::OkStatus();
}

// Whether a frame behind `position`, which has none, was written when that one was durable.
bool LaterBatchFollows(absl::string_view area, uint64_t nonce, uint64_t position) {
  const uint64_t units = area.size() / kIoUnit.count();
  for (uint64_t later = position + 1; later < units; ++later) {
    const std::optional<Frame> frame = DecodeFrame(area, nonce, later);
    if (frame && frame->batch > position) return true;
  }
  return false;
}

}  // namespace

absl::StatusOr<AreaContent> ReplayArea(const NvmeLayout& layout, const AreaHeader& header,
                                       absl::string_view area) {
  AreaContent content;
  Blocks blocks;
  uint64_t position = 1;
  while (const std::optional<Frame> frame = DecodeFrame(area, header.nonce, position)) {
    absl::string_view records = frame->records;
    while (!records.empty()) {
      std::optional<Change> change = DecodeChange(records);
      if (!change) return Damaged(position, "a record is malformed");
      Apply(*std::move(change), blocks);
    }
    content.last_written = std::max(content.last_written, frame->written);
    if (position > header.snapshot_units) ++content.log_frames;
    position += frame->units;
  }
  if (position <= header.snapshot_units) return Damaged(position, "the snapshot ends early");
  if (LaterBatchFollows(area, header.nonce, position)) {
    return Damaged(position, "later parts of the log follow");
  }
  if (absl::Status status = CheckExtents(blocks, layout.data_units()); !status.ok()) return status;
  content.blocks.reserve(blocks.size());
  for (auto& [place, record] : blocks) {
    content.blocks.push_back({std::move(record), TierPlace(place)});
  }
  return content;
}

}  // namespace palimpsest
