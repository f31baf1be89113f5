// A back-end whose medium knows blocking calls alone (files, memory), on a number of threads.
#ifndef PALIMPSEST_BROKER_TIER_THREADED_BACKEND_H_
#define PALIMPSEST_BROKER_TIER_THREADED_BACKEND_H_

#include <deque>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "broker/tier/tier_backend.h"
#include "common/mutex.h"

namespace palimpsest {

// The operations of TierBackend as blocking calls, with the same meaning. Thread-safe: several
// threads call, for different places.
class BlockingBackend {
 public:
  virtual ~BlockingBackend() = default;

  virtual std::string name() const = 0;
  virtual Bytes Footprint(Bytes length) const = 0;
  virtual absl::StatusOr<std::vector<StoredBlock>> Open() = 0;
  virtual absl::StatusOr<TierPlace> Write(const BlockRecord& record,
                                          absl::Span<const std::byte> from) = 0;
  virtual absl::Status Read(const BlockRecord& record, TierPlace place,
                            absl::Span<std::byte> to) = 0;
  virtual absl::Status Remove(const BlockRecord& record, TierPlace place,
                              TierBackend::RemoveReason reason) = 0;
  virtual absl::Status Purge(const std::string& tenant) = 0;
  virtual bool shared() const { return false; }
  virtual absl::StatusOr<StoredBlock> Find(const BlockIdentity& id) {
    (void)id;
    return absl::NotFoundError("the tier is not shared");
  }
  virtual absl::StatusOr<Discovery> Discover() {
    return absl::NotFoundError("the tier is not shared");
  }
};

// Operations begin in the order in which they came; the store bounds how many there are.
class ThreadedBackend : public TierBackend {
 public:
  // Requires threads >= 1.
  ThreadedBackend(std::unique_ptr<BlockingBackend> medium, int threads);
  ~ThreadedBackend() override;

  std::string name() const override { return medium_->name(); }
  Bytes Footprint(Bytes length) const override { return medium_->Footprint(length); }
  absl::StatusOr<std::vector<StoredBlock>> Open() override { return medium_->Open(); }
  void Close() override;
  void Write(const BlockRecord& record, absl::Span<const std::byte> from, Written done) override;
  void Read(const BlockRecord& record, TierPlace place, absl::Span<std::byte> to,
            Done done) override;
  void Remove(const BlockRecord& record, TierPlace place, RemoveReason reason, Done done) override;
  void Purge(const std::string& tenant, Done done) override;
  bool shared() const override { return medium_->shared(); }
  void Find(const BlockIdentity& id, Found done) override;
  void Discover(Discovered done) override;

 private:
  using Work = absl::AnyInvocable<void()>;

  void Enqueue(Work work);
  void RunThread();

  const std::unique_ptr<BlockingBackend> medium_;
  Mutex mu_;
  CondVar changed_;
  std::deque<Work> work_ ABSL_GUARDED_BY(mu_);
  bool closed_ ABSL_GUARDED_BY(mu_) = false;
  std::vector<std::thread> threads_;
};

}  // namespace palimpsest

#endif  // PALIMPSEST_BROKER_TIER_THREADED_BACKEND_H_
