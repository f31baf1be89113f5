#include "broker/server/journal_replay.h"

#include <algorithm>
#include <cstring>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "xxhash.h"

namespace palimpsest {
namespace {

constexpr size_t kHeaderBytes = 16;

void PutLittleEndian(uint64_t value, int bytes, std::string& out) {
  for (int i = 0; i < bytes; ++i) out.push_back(static_cast<char>(value >> (8 * i)));
}

uint64_t GetLittleEndian(absl::string_view in, size_t at, int bytes) {
  uint64_t value = 0;
  for (int i = 0; i < bytes; ++i) {
    value |= uint64_t{static_cast<uint8_t>(in[at + i])} << (8 * i);
  }
  return value;
}

uint64_t FrameHash(absl::string_view payload, uint32_t sequence) {
  const uint64_t seed = (uint64_t{sequence} << 32) | payload.size();
  return XXH3_64bits_withSeed(payload.data(), payload.size(), seed);
}

struct Frame {
  absl::string_view payload;
  uint32_t sequence = 0;
};

// The frame at `at`, if its length fits and its hash is right.
std::optional<Frame> FrameAt(absl::string_view file, size_t at) {
  if (file.size() - at < kHeaderBytes) return std::nullopt;
  const size_t length = GetLittleEndian(file, at, 4);
  if (length > kMaxJournalPayload || length > file.size() - at - kHeaderBytes) return std::nullopt;
  Frame frame{file.substr(at + kHeaderBytes, length),
              static_cast<uint32_t>(GetLittleEndian(file, at + 4, 4))};
  if (FrameHash(frame.payload, frame.sequence) != GetLittleEndian(file, at + 8, 8)) {
    return std::nullopt;
  }
  return frame;
}

// Whether frame number `sequence` or a later one starts anywhere from `at` on. A frame takes at
// least its header, which bounds the sequence numbers worth hashing for.
bool LaterFrameFrom(absl::string_view file, size_t at, uint32_t sequence) {
  const uint64_t last = sequence + (file.size() - at) / kHeaderBytes;
  for (size_t i = at; i + kHeaderBytes <= file.size(); ++i) {
    const uint64_t found = GetLittleEndian(file, i + 4, 4);
    if (found < sequence || found > last) continue;
    if (FrameAt(file, i).has_value()) return true;
  }
  return false;
}

}  // namespace

absl::Status JournalState::Apply(const journal::Record& record) {
  switch (record.record_case()) {
    case journal::Record::kGeneration:
      if (record.generation().generation() <= generation.generation()) {
        return absl::InvalidArgumentError(absl::StrCat(
            "generation ", record.generation().generation(), " after ", generation.generation()));
      }
      generation = record.generation();
      return absl::OkStatus();
    case journal::Record::kSessionOpened: {
      const journal::SessionOpened& opened = record.session_opened();
      if (!sessions.emplace(SessionId(opened.session_id()), opened).second) {
        return absl::InvalidArgumentError(
            absl::StrCat("session ", opened.session_id(), " opened twice"));
      }
      return absl::OkStatus();
    }
    case journal::Record::kSessionEnded: {
      const uint64_t id = record.session_ended().session_id();
      if (sessions.erase(SessionId(id)) == 0) {
        return absl::InvalidArgumentError(absl::StrCat("session ", id, " ended but is not open"));
      }
      std::erase_if(slabs, [id](const auto& entry) { return entry.second.session_id() == id; });
      return absl::OkStatus();
    }
    case journal::Record::kSlabGranted: {
      const journal::SlabGranted& granted = record.slab_granted();
      if (!sessions.contains(SessionId(granted.session_id()))) {
        return absl::InvalidArgumentError(absl::StrCat("slab ", granted.slab_id(),
                                                       " granted to session ", granted.session_id(),
                                                       ", which is not open"));
      }
      slabs[SlabId(granted.slab_id())] = granted;
      return absl::OkStatus();
    }
    case journal::Record::kSlabReleased: {
      const auto it = slabs.find(SlabId(record.slab_released().slab_id()));
      if (it != slabs.end() && it->second.epoch() <= record.slab_released().epoch()) {
        slabs.erase(it);
      }
      return absl::OkStatus();
    }
    case journal::Record::kImage:
      images[record.image().fingerprint()] = record.image();
      return absl::OkStatus();
    case journal::Record::RECORD_NOT_SET:
      break;
  }
  return absl::InvalidArgumentError("a record of no known kind");
}

std::vector<journal::Record> JournalState::Snapshot() const {
  std::vector<journal::Record> records;
  if (generation.generation() != 0) *records.emplace_back().mutable_generation() = generation;
  for (const auto& [id, session] : sessions) {
    *records.emplace_back().mutable_session_opened() = session;
  }
  for (const auto& [id, slab] : slabs) *records.emplace_back().mutable_slab_granted() = slab;
  for (const auto& [id, image] : images) *records.emplace_back().mutable_image() = image;
  return records;
}

void AppendJournalFrame(const journal::Record& record, uint32_t sequence, std::string& out) {
  const std::string payload = record.SerializeAsString();
  PutLittleEndian(payload.size(), 4, out);
  PutLittleEndian(sequence, 4, out);
  PutLittleEndian(FrameHash(payload, sequence), 8, out);
  out.append(payload);
}

JournalReplay ReplayJournal(absl::string_view file) {
  JournalReplay replay;
  replay.dropped_bytes = file.size();
  const absl::string_view magic = file.substr(0, kJournalMagic.size());
  if (magic != kJournalMagic.substr(0, magic.size())) {
    replay.damage =
        absl::DataLossError(absl::StrCat("the file does not start with ", kJournalMagic,
                                         ": it is not a journal, or its first bytes are damaged"));
    return replay;
  }
  if (file.size() < kJournalMagic.size()) return replay;
  size_t at = kJournalMagic.size();
  while (at < file.size() && replay.damage.ok()) {
    const std::optional<Frame> frame = FrameAt(file, at);
    if (!frame || frame->sequence != replay.frames) break;
    journal::Record record;
    if (!record.ParseFromArray(frame->payload.data(), static_cast<int>(frame->payload.size()))) {
      replay.damage =
          absl::DataLossError(absl::StrCat("the record at byte ", at, " does not parse"));
    } else if (const absl::Status applied = replay.state.Apply(record); !applied.ok()) {
      replay.damage = absl::DataLossError(absl::StrCat(
          "the record at byte ", at, " contradicts those before: ", applied.message()));
    } else {
      at += kHeaderBytes + frame->payload.size();
      ++replay.frames;
    }
  }
  if (replay.damage.ok() && at < file.size() && LaterFrameFrom(file, at, replay.frames)) {
    replay.damage = absl::DataLossError(
        absl::StrCat("the record at byte ", at, " is damaged while later ones are intact"));
  }
  replay.valid_bytes = at;
  replay.dropped_bytes = file.size() - at;
  return replay;
}

}  // namespace palimpsest
