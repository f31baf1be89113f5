// A FakeBroker's book of slabs: it does at a test's word what a broker's policy would, and keeps
// track of what the worker answers. Whatever comes back is filled with a pattern that is no weight
// (NaN in every format), so that a worker which reads it shows.
//
// Threads: the test's.
#ifndef PALIMPSEST_WORKER_MEMORY_TESTING_SCRIPTED_POOL_H_
#define PALIMPSEST_WORKER_MEMORY_TESTING_SCRIPTED_POOL_H_

#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <vector>

#include "broker/core/slab_moves.h"
#include "common/rotation.h"
#include "worker/memory/testing/fake_broker.h"

namespace palimpsest {

class ScriptedPool {
 public:
  static constexpr unsigned char kPattern = 0xff;

  // All stages but the first and the last are layers, equally large. The broker is up, and the
  // worker attached for the first time.
  ScriptedPool(FakeBroker* broker, const FakeBroker::Model& model);

  // Each begins something, unless something else of the parameters is under way or there are too
  // few slabs: then false.
  bool GrantImage();                      // what is missing, while nothing rotates
  bool RevokeStage(uint32_t stage);       // while nothing rotates
  bool Rotate(const Rotation& rotation);  // of a whole image
  bool Dissolve();                        // nothing rotates, and the rotating layers are missing
  bool GrantKv(uint32_t slabs);
  void RevokeKv(uint32_t slabs);

  // Takes note of what the worker said.
  void Pump();

  // Kills the broker, starts the next one, and takes over what the worker brings.
  void Restart();

  bool idle() const { return state_ == State::kIdle; }
  bool whole() const;
  const Rotation& rotation() const { return rotation_; }
  int32_t layers() const { return static_cast<int32_t>(stages_.size()) - 2; }
  uint32_t stages() const { return static_cast<uint32_t>(stages_.size()); }
  // The slab at a place of the parameter region; there must be one.
  uint32_t ParameterAt(uint32_t place) const {
    return static_cast<uint32_t>(parameters_[place]->value());
  }
  uint32_t kv() const { return static_cast<uint32_t>(kv_.size()); }
  int kv_revokes() const { return kv_revokes_; }  // under way
  uint32_t kv_target() const { return kv_target_; }
  uint32_t free() const { return static_cast<uint32_t>(free_.size()); }
  int rotations() const { return rotations_; }
  int restarts() const { return attached_ - 1; }

 private:
  enum class State { kIdle, kGranting, kRevoking, kGrantingSpare, kRotating };

  uint32_t TakeFree() { return free_.extract(free_.begin()).value(); }
  void ComeBack(uint32_t slab);
  SlabPlaces Places();
  // Slabs more that the rotation takes.
  int64_t Missing(const Rotation& rotation) const;
  void SendRotation();
  void Handle(const v1::WorkerMessage& message);
  void TakeOver(const v1::Reattach& held);

  FakeBroker* const broker_;
  const uint32_t pool_slabs_;
  std::vector<ParameterStage> stages_;
  std::set<uint32_t> free_;
  std::set<uint32_t> kv_;
  std::vector<std::optional<SlabId>> parameters_;
  std::vector<std::optional<SlabId>> slots_;
  Rotation rotation_;
  uint32_t kv_target_ = 0;
  int kv_revokes_ = 0;

  State state_ = State::kIdle;
  uint64_t awaited_ = 0;  // id of what is under way
  std::optional<Rotation> wanted_;
  bool dissolving_ = false;
  std::vector<SlabMove> moves_;
  int rotations_ = 0;
  int attached_ = 1;
};

}  // namespace palimpsest

#endif  // PALIMPSEST_WORKER_MEMORY_TESTING_SCRIPTED_POOL_H_
