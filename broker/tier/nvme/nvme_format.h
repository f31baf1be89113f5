// What lies on a device of the NVMe tier. Pure: bytes in, values out.
//
//   unit 0, 1        superblock, twice: never changes once the device is formatted
//   two areas        metadata; one is in use, the other one takes the next snapshot
//   the rest         data: the extents of blocks, bare bytes
//
// An area is a header (generation, nonce, length of the snapshot) and then frames: those of the
// snapshot, then those of the log. A frame is up to kMaxFrame bytes of records under one checksum,
// which also covers the header's nonce and the frame's place: what an earlier use of the area left
// behind is no frame. Frames that are written together are a batch; the next batch is written only
// after the one before it has been flushed. So an invalid frame followed by one of a later batch is
// damage, while one followed by nothing, or by the rest of its batch, is where power was lost.
//
// Numbers are little-endian. Checksums are XXH3-64. Everything that is decoded may be anything.
#ifndef PALIMPSEST_BROKER_TIER_NVME_NVME_FORMAT_H_
#define PALIMPSEST_BROKER_TIER_NVME_NVME_FORMAT_H_

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "broker/tier/block_record.h"
#include "broker/tier/nvme/block_device.h"
#include "common/bytes.h"

namespace palimpsest {

inline constexpr Bytes kMaxFrame = KiB(64);
inline constexpr Bytes kMinArea = KiB(128);
inline constexpr Bytes kMaxArea = GiB(1);

struct NvmeLayout {
  uint64_t volume = 0;  // random; tells this device's metadata from any other's
  Bytes device;
  Bytes area;  // of each of the two

  Bytes area_offset(int index) const { return kIoUnit * 2 + area * index; }
  Bytes data_offset() const { return area_offset(2); }
  uint64_t data_units() const { return (device - data_offset()) / kIoUnit; }
  uint64_t area_units() const { return area / kIoUnit; }

  friend bool operator==(const NvmeLayout&, const NvmeLayout&) = default;
};

// 1/256 of the device, within kMinArea and kMaxArea: enough for blocks of 128 KiB and more with a
// few tokens each, and for three million of them.
Bytes DefaultArea(Bytes device);

// InvalidArgument unless sizes are whole units, the area within its bounds, and data has room.
absl::Status ValidateLayout(const NvmeLayout& layout);

// One unit each.
std::string EncodeSuperblock(const NvmeLayout& layout);
std::optional<NvmeLayout> DecodeSuperblock(absl::string_view unit);

struct AreaHeader {
  uint64_t generation = 0;  // the area with the higher one counts
  uint64_t nonce = 0;       // random for each snapshot
  uint64_t snapshot_units = 0;

  friend bool operator==(const AreaHeader&, const AreaHeader&) = default;
};

std::string EncodeAreaHeader(uint64_t volume, const AreaHeader& header);
std::optional<AreaHeader> DecodeAreaHeader(uint64_t volume, absl::string_view unit);

// Records. `place` is the first unit of the block's extent, counted from the start of the data.
std::string EncodePut(const BlockRecord& record, uint64_t place);
std::string EncodeRemove(const BlockKey& key, uint64_t place);
std::string EncodePurge(absl::string_view tenant);

struct Change {
  enum class Kind : uint8_t { kPut = 1, kRemove = 2, kPurge = 3 };

  Kind kind = Kind::kPut;
  uint64_t place = 0;  // kPut, kRemove
  BlockRecord record;  // kPut; of a kRemove only the key
  std::string tenant;  // kPurge
};

// Takes the first record off `records`; nothing if it is malformed.
std::optional<Change> DecodeChange(absl::string_view& records);

// Packs records into the frames of one batch.
class FrameWriter {
 public:
  // The first frame comes at unit `position` of its area, counting the header's as 0. `now` is
  // written to each frame.
  FrameWriter(uint64_t nonce, uint64_t position, absl::Time now);

  // A record as encoded above.
  void Add(absl::string_view record);

  // Bytes so far.
  size_t size() const { return frames_.size(); }

  // Whole units, and nothing if nothing was added. Ends the use of the writer.
  std::string Finish();

 private:
  void BeginFrame();
  void EndFrame();

  const uint64_t nonce_, position_;
  const int64_t now_;
  std::string frames_;
  size_t header_at_ = 0;  // of the open frame
  bool open_ = false;
};

struct Frame {
  uint64_t batch = 0;  // where the first frame of its batch lies
  uint64_t units = 0;
  absl::Time written;
  absl::string_view records;
};

// The frame at unit `position` of an area, nothing unless a whole valid one is there.
std::optional<Frame> DecodeFrame(absl::string_view area, uint64_t nonce, uint64_t position);

}  // namespace palimpsest

#endif  // PALIMPSEST_BROKER_TIER_NVME_NVME_FORMAT_H_
