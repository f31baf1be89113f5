// A broker's side of the memory client for tests, without a broker: the test says what comes and
// goes, and sees what the engine answered. KV memory that is not mapped is garbage, and becomes
// garbage again when it is given back.
//
// Thread-safe.
#ifndef PALIMPSEST_WORKER_MEMORY_FAKE_MEMORY_CLIENT_H_
#define PALIMPSEST_WORKER_MEMORY_FAKE_MEMORY_CLIENT_H_

#include <cstddef>
#include <functional>
#include <map>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "common/bytes.h"
#include "common/mutex.h"
#include "worker/memory/memory_client.h"

namespace palimpsest {

class FakeMemoryClient : public MemoryClient, public ParameterGate {
 public:
  FakeMemoryClient(Bytes slab_bytes, int32_t region_slabs);

  std::byte* kv() { return kv_.data(); }

  // What the broker does.
  void Connect(bool reattached = false);
  void Lose();
  // Maps up to `count` slabs at the lowest free places; returns how many.
  int32_t GrantKv(int32_t count);
  // Maps slabs at these places.
  void GrantKvAt(const std::vector<uint32_t>& places);
  // As many as the engine has asked for.
  int32_t GrantKvTarget();
  RevokeId RevokeKv(int32_t slabs);
  RevokeId RevokeParameters();
  void RestoreParameters();
  // Layers whose memory is not played: what counts is who is told, and when.
  RotationId SetRotation(const Rotation& rotation);
  // What FinishRotation answers comes when this is false again.
  void HoldRotations(bool hold);
  // Of those that are held: tells the engine of the first.
  void SettleOldestRotation();
  // Those that are wanted are void.
  void VoidRotations();
  // As in temporal sharing from here on.
  void ConnectWithTurns(bool reattached = false);
  TurnId BeginTurn();
  void EndTurn(TurnId turn);
  void RefuseActivation(const std::string& message, absl::Duration retry_after);
  // Lets AwaitStage(stage) fail from now on; -1: none.
  void FailStage(int stage);

  // `check` is called whenever slabs are about to go.
  void SetBeforeGive(std::function<void()> check) { before_give_ = std::move(check); }

  // What the engine did.
  std::map<RevokeId, std::vector<RegionIndex>> finished_revokes() const;
  std::vector<TurnId> finished_turns() const;
  int32_t target() const;
  int32_t needed() const;
  std::vector<ActivationReason> activations() const;
  WorkerLoad load() const;
  // Rotations that FinishRotation was not called for.
  size_t open_rotations() const;
  bool detached() const;

  // MemoryClient:
  std::vector<MemoryEvent> TakeEvents() override;
  void SetWakeup(std::function<void()> wake) override;
  bool ParametersAvailable() const override;
  MappedSlabs Mapped() const override;
  void RequestActivation(ActivationReason reason) override;
  void SetKvTarget(int32_t target_slabs, int32_t needed_slabs) override;
  void FinishKvRevoke(RevokeId id, absl::Span<const RegionIndex> indexes) override;
  void FinishParameterRevoke(RevokeId id) override;
  void FinishRotation(RotationId id) override;
  void FinishTurn(TurnId id) override;
  void ReleaseKv(absl::Span<const RegionIndex> indexes) override;
  void SendReport(const WorkerLoad& load) override;
  ParameterGate& gate() override { return *this; }
  void Detach() override;

  // ParameterGate:
  absl::Status AwaitStage(int stage) override;

 private:
  void Push(MemoryEvent event);
  void Unmap(absl::Span<const RegionIndex> indexes) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Garble(RegionIndex index) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const Bytes slab_bytes_;
  std::vector<std::byte> kv_;
  std::function<void()> before_give_ = [] {};

  Mutex wake_mutex_;  // held during the call
  std::function<void()> wake_ ABSL_GUARDED_BY(wake_mutex_);

  mutable Mutex mutex_;
  std::vector<MemoryEvent> events_ ABSL_GUARDED_BY(mutex_);
  std::vector<bool> mapped_ ABSL_GUARDED_BY(mutex_);
  uint64_t next_revoke_ ABSL_GUARDED_BY(mutex_) = 1;
  std::map<RevokeId, std::vector<RegionIndex>> finished_ ABSL_GUARDED_BY(mutex_);
  uint64_t next_rotation_ ABSL_GUARDED_BY(mutex_) = 1;
  std::map<RotationId, Rotation> rotations_ ABSL_GUARDED_BY(mutex_);  // wanted
  std::set<RotationId> void_ ABSL_GUARDED_BY(mutex_);                 // of those
  bool hold_rotations_ ABSL_GUARDED_BY(mutex_) = false;
  std::vector<RotationSettled> held_ ABSL_GUARDED_BY(mutex_);
  uint64_t next_turn_ ABSL_GUARDED_BY(mutex_) = 1;
  std::vector<TurnId> finished_turns_ ABSL_GUARDED_BY(mutex_);
  bool parameters_ ABSL_GUARDED_BY(mutex_) = true;
  bool gate_open_ ABSL_GUARDED_BY(mutex_) = true;
  int failing_stage_ ABSL_GUARDED_BY(mutex_) = -1;
  int32_t target_ ABSL_GUARDED_BY(mutex_) = 0;
  int32_t needed_ ABSL_GUARDED_BY(mutex_) = 0;
  std::vector<ActivationReason> activations_ ABSL_GUARDED_BY(mutex_);
  WorkerLoad load_ ABSL_GUARDED_BY(mutex_);
  bool detached_ ABSL_GUARDED_BY(mutex_) = false;
};

}  // namespace palimpsest

#endif  // PALIMPSEST_WORKER_MEMORY_FAKE_MEMORY_CLIENT_H_
