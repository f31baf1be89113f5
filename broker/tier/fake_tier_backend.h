// A tier in this process's memory, for tests: operations end at once, or when the test says so and
// as it says. Not thread-safe.
#ifndef PALIMPSEST_BROKER_TIER_FAKE_TIER_BACKEND_H_
#define PALIMPSEST_BROKER_TIER_FAKE_TIER_BACKEND_H_

#include <cstring>
#include <deque>
#include <map>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "broker/tier/tier_backend.h"

namespace palimpsest {

class FakeTierBackend : public TierBackend {
 public:
  enum class Kind { kWrite, kRead, kRemove, kPurge, kFind, kDiscover };

  struct Operation {
    Kind kind;
    const BlockRecord* record = nullptr;
    TierPlace place;
    RemoveReason reason = RemoveReason::kUnwanted;
    absl::Span<const std::byte> from;
    absl::Span<std::byte> to;
    std::string tenant;
    Written written;
    Done done;
    Found found;
    Discovered discovered;
  };

  // What a test sees and sets. Outlives the back-end.
  struct Medium {
    bool hold = false;   // operations wait in `pending` for Finish
    absl::Status fault;  // of all operations that end by themselves
    bool shared = false;
    std::map<uint64_t, std::pair<BlockRecord, std::vector<std::byte>>> blocks;
    std::map<uint64_t, std::pair<BlockRecord, std::vector<std::byte>>> of_other_nodes;
    // What looks at them tell, one after the other; then that there is nothing new.
    std::deque<Discovery> looks;
    std::set<uint64_t> corrupt_places;
    std::vector<std::string> purged;
    std::deque<Operation> pending;
    uint64_t last_place = 0;
    int closed = 0;

    // Ends one that waits, with what it should do or with an error.
    void Finish(size_t index, const absl::Status& status = absl::OkStatus()) {
      Operation operation = std::move(pending[index]);
      pending.erase(pending.begin() + index);
      End(std::move(operation), status);
    }
    void FinishAll() {
      while (!pending.empty()) Finish(0, fault);
    }

    void End(Operation operation, const absl::Status& status) {
      switch (operation.kind) {
        case Kind::kWrite: {
          if (!status.ok()) return operation.written(status);
          const uint64_t place = ++last_place;
          blocks[place] = {*operation.record, {operation.from.begin(), operation.from.end()}};
          return operation.written(TierPlace(place));
        }
        case Kind::kRead: {
          if (!status.ok()) return operation.done(status);
          const auto& from = operation.place.value() > kForeign ? of_other_nodes : blocks;
          const auto block = from.find(operation.place.value());
          if (block == from.end()) return operation.done(absl::NotFoundError("gone"));
          std::memcpy(operation.to.data(), block->second.second.data(), operation.to.size());
          return operation.done(absl::OkStatus());
        }
        case Kind::kRemove:
          if (status.ok()) {
            blocks.erase(operation.place.value());
            if (operation.reason == RemoveReason::kCorrupt) {
              corrupt_places.insert(operation.place.value());
            }
          }
          return operation.done(status);
        case Kind::kPurge:
          if (status.ok()) purged.push_back(operation.tenant);
          return operation.done(status);
        case Kind::kFind:
          if (!status.ok()) return operation.found(status);
          for (const auto& [place, block] : of_other_nodes) {
            if (block.first.id.key == operation.record->id.key) {
              return operation.found(StoredBlock{block.first, TierPlace(place)});
            }
          }
          return operation.found(absl::NotFoundError("no such file"));
        case Kind::kDiscover: {
          if (!status.ok()) return operation.discovered(status);
          Discovery discovery{.complete = true};
          if (!looks.empty()) {
            discovery = std::move(looks.front());
            looks.pop_front();
          }
          return operation.discovered(std::move(discovery));
        }
      }
    }
  };

  static constexpr uint64_t kForeign = uint64_t{1} << 32;
  static constexpr Bytes kHeader{64};

  explicit FakeTierBackend(Medium* medium) : medium_(medium) {}

  std::string name() const override { return "fake"; }
  Bytes Footprint(Bytes length) const override { return length + kHeader; }
  bool shared() const override { return medium_->shared; }
  absl::StatusOr<std::vector<StoredBlock>> Open() override {
    std::vector<StoredBlock> found;
    for (const auto& [place, block] : medium_->blocks) {
      found.push_back({block.first, TierPlace(place)});
    }
    return found;
  }
  void Close() override { ++medium_->closed; }
  void Write(const BlockRecord& record, absl::Span<const std::byte> from, Written done) override {
    Begin({.kind = Kind::kWrite, .record = &record, .from = from, .written = std::move(done)});
  }
  void Read(const BlockRecord& record, TierPlace place, absl::Span<std::byte> to,
            Done done) override {
    Begin({.kind = Kind::kRead,
           .record = &record,
           .place = place,
           .to = to,
           .done = std::move(done)});
  }
  void Remove(const BlockRecord& record, TierPlace place, RemoveReason reason, Done done) override {
    Begin({.kind = Kind::kRemove,
           .record = &record,
           .place = place,
           .reason = reason,
           .done = std::move(done)});
  }
  void Purge(const std::string& tenant, Done done) override {
    Begin({.kind = Kind::kPurge, .tenant = tenant, .done = std::move(done)});
  }
  void Find(const BlockIdentity& id, Found done) override {
    wanted_.push_back({.id = id});
    Begin({.kind = Kind::kFind, .record = &wanted_.back(), .found = std::move(done)});
  }
  void Discover(Discovered done) override {
    Begin({.kind = Kind::kDiscover, .discovered = std::move(done)});
  }

 private:
  void Begin(Operation operation) {
    if (medium_->hold) {
      medium_->pending.push_back(std::move(operation));
    } else {
      medium_->End(std::move(operation), medium_->fault);
    }
  }

  Medium* const medium_;
  std::deque<BlockRecord> wanted_;
};

}  // namespace palimpsest

#endif  // PALIMPSEST_BROKER_TIER_FAKE_TIER_BACKEND_H_
