// What a journal says, as pure functions of its bytes: framing, replay and snapshot.
//
// A file is the 8 bytes of kJournalMagic followed by frames
//   u32 payload length | u32 sequence | u64 xxh3 of the payload, seeded with length and sequence
// (little-endian) and the payload, a serialized palimpsest.journal.Record. `sequence` counts frames
// from 0, so that a frame is valid only at its own place in the file.
//
// A file that ends in the middle of a frame, or whose last frame is damaged, was being written when
// the broker or the machine died: nothing was done on the strength of that frame, and it is
// dropped. A damaged frame with a valid one behind it is corruption (DataLoss);
// after a power cut it is to be expected, since only the first frames, the snapshot, were synced.
#ifndef PALIMPSEST_BROKER_SERVER_JOURNAL_REPLAY_H_
#define PALIMPSEST_BROKER_SERVER_JOURNAL_REPLAY_H_

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "broker/server/journal.pb.h"
#include "common/ids.h"

namespace palimpsest {

inline constexpr absl::string_view kJournalMagic = "PLMPJRN1";
inline constexpr size_t kMaxJournalPayload = 16 << 20;

// Who held what after some prefix of a journal.
struct JournalState {
  // generation.generation() is 0 before the first record.
  journal::Generation generation;
  std::map<SessionId, journal::SessionOpened> sessions;
  std::map<SlabId, journal::SlabGranted> slabs;
  // By fingerprint.
  std::map<std::string, journal::Image> images;

  // Refuses (InvalidArgument, state unchanged) a record that no broker writes: a slab granted to a
  // session that is not open, a session opened twice, a generation that does not grow.
  absl::Status Apply(const journal::Record& record);

  // Records that lead from an empty state to this one.
  std::vector<journal::Record> Snapshot() const;
};

// Appends one frame. Requires a payload of at most kMaxJournalPayload.
void AppendJournalFrame(const journal::Record& record, uint32_t sequence, std::string& out);

struct JournalReplay {
  // After the intact frames at the start of the file.
  JournalState state;
  size_t valid_bytes = 0;
  uint32_t frames = 0;
  // Bytes behind them: a last frame that was cut short or damaged, or, if `damage` says so, more.
  size_t dropped_bytes = 0;
  // DataLoss with the place, if records behind the intact ones were lost.
  absl::Status damage;
};

// An empty file is an empty journal.
JournalReplay ReplayJournal(absl::string_view file);

}  // namespace palimpsest

#endif  // PALIMPSEST_BROKER_SERVER_JOURNAL_REPLAY_H_
