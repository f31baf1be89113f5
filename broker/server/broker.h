// The broker's core: turns what workers, processes and time do into events of the arbiter, and the
// arbiter's actions into messages, descriptors, journal entries, signals and fresh memory.
//
// Locking: one lock guards the arbiter and the sessions. Every event is decided under it; the
// actions are queued under it, in the arbiter's order, and carried out after it was released, still
// in order, by one thread at a time (whichever caused them). Slabs are cleaned on threads of their
// own. What an action led to comes back as the next event.
//
// Journal: a session is recorded before its worker learns its id, a slab before the grant is sent,
// a release after the slab was cleaned. If a record cannot be written after some tries, `fatal` is
// called: workers keep what they hold, and a broker that is started once the disk has room again
// finds the rest in the journal.
//
// Threads: all methods are thread-safe, and block at most on a journal write or another thread's
// actions. Legal order: Create, Start once, anything, Stop.
#ifndef PALIMPSEST_BROKER_SERVER_BROKER_H_
#define PALIMPSEST_BROKER_SERVER_BROKER_H_

#include <array>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <variant>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "broker/core/arbiter.h"
#include "broker/core/peer_images.h"
#include "broker/core/pool_config.h"
#include "broker/device/slab_device.h"
#include "broker/server/block_sessions.h"
#include "broker/server/broker_metrics.h"
#include "broker/server/descriptor_server.h"
#include "broker/server/hand_over.h"
#include "broker/server/image_manager.h"
#include "broker/server/journal.h"
#include "broker/server/process_watcher.h"
#include "broker/server/sealed_image.h"
#include "broker/server/session_stream.h"
#include "broker/server/slab_cleaner.h"
#include "broker/server/worker_messages.h"
#include "common/clock.h"
#include "common/mutex.h"

namespace palimpsest {

class Broker : public DescriptorDelegate {
 public:
  struct Options {
    // `generation` is taken from the journal.
    ArbiterOptions arbiter;
    Bytes slab_bytes;
    MemoryPolicy memory_policy = MemoryPolicy::kRemap;
    // By TenantId; as ConfigUnder that policy gives them.
    std::vector<TenantConfig> tenants;
    // Slabs of each tenant's parameter image.
    std::vector<uint32_t> image_slabs;
    // By tenant; BrokerTenant.context.
    std::vector<Bytes> context_allowance;
    // Slabs of memory on GPU `peer_gpu`, which is not the pool's, for copies of parameter images,
    // and which tenants (by TenantId) have some.
    uint32_t peer_slabs = 0;
    int peer_gpu = 0;
    std::vector<bool> peer_images;
    // By tenant; BrokerTenant.hibernate_after. May be empty: never.
    std::vector<absl::Duration> hibernate_after;
    // How long the descriptors of a grant or an image can be fetched.
    absl::Duration token_lifetime = absl::Seconds(30);
    // How slabs that come back are cleaned: replaced, or zeroed in place (workers are trusted).
    enum class Cleaning { kRetire, kScrub };
    Cleaning cleaning = Cleaning::kRetire;
    size_t cleaner_threads = CleanerThreads(std::thread::hardware_concurrency());
    // How long Start waits for memory that workers of an earlier broker are about to let go of.
    absl::Duration memory_patience = absl::ZeroDuration();
  };
  // What it works with; all must outlive it.
  struct Parts {
    const Clock& clock;
    Journal& journal;
    SlabDevice& device;
    ImageManager& images;
    HandOverTable& hand_overs;
    BrokerMetrics& metrics;
    std::function<void(const absl::Status&)> fatal;
    // Null without tiers.
    BlockSessions* blocks = nullptr;
  };

  using PeerMemory = std::vector<std::shared_ptr<const UniqueFd>>;

  // One worker's attachment. Everything but the id, tenant, process and fingerprint belongs to the
  // broker.
  struct Session {
    SessionId id;
    std::optional<TenantId> tenant;
    std::string tenant_name;
    std::shared_ptr<const ProcessHandle> process;
    // Of the image that its parameter slabs are restored from.
    std::string fingerprint;
    // Whether it carries out SetRotation.
    bool rotates = false;

    // Null while no connection stands.
    std::shared_ptr<SessionStream> stream;
    // Null until its worker has returned.
    std::shared_ptr<const SealedImage> image;
    // Memory of its copy of the image on another GPU, which is there as long as the broker or the
    // worker has it.
    PeerMemory peer_memory;
  };

  // Takes over what the journal says of earlier generations: their slabs wait for their workers,
  // every other slab gets memory now.
  static absl::StatusOr<std::unique_ptr<Broker>> Create(Options options, Parts parts);
  ~Broker() override;

  // Starts the threads. Before it, no event may come.
  absl::Status Start();
  // Ends all streams and joins the threads; slabs stay with the workers. Idempotent.
  void Stop();

  // AlreadyExists, naming the process, while another session of the tenant has not ended.
  absl::Status CheckVacant(const DescriptorPeer& peer);

  // Opens a session of a worker that can let layers rotate, or not, and queues its Attached
  // message.
  absl::StatusOr<std::shared_ptr<Session>> Attach(const DescriptorPeer& peer,
                                                  std::shared_ptr<const SealedImage> image,
                                                  std::shared_ptr<SessionStream> stream,
                                                  bool rotates);

  // The session that a worker wants back, if it is its own. NotFound if there is none: the worker
  // must start anew. PermissionDenied for the session of another process; otherwise as Reattach.
  absl::StatusOr<std::shared_ptr<Session>> FindReturning(const DescriptorPeer& peer,
                                                         const v1::Reattach& message);

  // Brings a session back and queues its Attached message. `image` has the session's fingerprint.
  // An earlier connection of the session is closed. InvalidArgument for a message that breaks its
  // bounds, FailedPrecondition if a slab is claimed whose descriptor was not returned.
  absl::Status Reattach(const std::shared_ptr<Session>& session, const v1::Attach& message,
                        std::shared_ptr<const SealedImage> image,
                        std::shared_ptr<SessionStream> stream);

  // A message that came over `stream`. InvalidArgument, with nothing changed, for one that breaks
  // its bounds: the stream must be closed.
  absl::Status Handle(const std::shared_ptr<Session>& session,
                      const std::shared_ptr<SessionStream>& stream,
                      const v1::WorkerMessage& message);

  // The stream has ended or is about to. Ignored if the session has another one by now.
  void Disconnect(const std::shared_ptr<Session>& session,
                  const std::shared_ptr<SessionStream>& stream);

  v1::GetStatusResponse Status();
  v1::GetRemapLogResponse RemapDecisions(const v1::GetRemapLogRequest& request);

  // DescriptorDelegate:
  absl::Status ReturnSlab(const DescriptorPeer& peer, const SlabEntry& entry,
                          SlabDescriptors memory) override;
  absl::Status ReturnImage(const DescriptorPeer& peer, const std::string& fingerprint,
                           UniqueFd image) override;
  void ConnectionClosed(const DescriptorPeer& peer) override;

  // Sessions that have not ended.
  size_t sessions();

  // The arbiter's own recount.
  absl::Status CheckConsistency();

 private:
  // Tells a worker that its session stands.
  struct SendAttached {
    bool recorded = false;  // the journal knows the session already
    bool send_image = false;
    std::shared_ptr<const SealedImage> image;
  };
  struct Work {
    // PeerMemory: to be released.
    std::variant<ArbiterAction, SendAttached, PeerImages::Offer, PeerMemory> what;
    // Null for CleanSlabs, TransferFinished and PeerMemory.
    std::shared_ptr<Session> session;
    std::shared_ptr<SessionStream> stream;  // its stream at the time of the decision
  };

  Broker(Options options, Parts parts);

  absl::Status AdoptJournal();
  // Gives memory to slabs that no worker of an earlier broker holds.
  absl::Status CreateSlabs(absl::Span<const SlabId> slabs);
  std::vector<absl::Status> CleanSlabMemory(absl::Span<const SlabId> slabs);
  void TimerLoop();
  // Makes ProcessGone come when the process ends. Once for each process, however often it attaches.
  absl::Status WatchOnce(const std::shared_ptr<const ProcessHandle>& process);
  void ProcessGone(const ProcessIdentity& process);
  // FailedPrecondition if one of `held` is claimed whose descriptor was not returned.
  absl::Status CheckReturned(SessionId session, absl::Span<const HeldSlab> held)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void Apply(Session& session, const WorkerEvent& event, absl::Time now)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // Runs `event` under the lock, then carries out what it led to.
  template <typename Event>
  void Decide(Event event) {
    {
      MutexLock lock(&mu_);
      event(parts_.clock.Now());
      Collect();
    }
    Drain();
  }
  // Queues the arbiter's new actions, and what is to be said about copies of images.
  void Collect() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // The session's worker is there, and without a copy of its image.
  void ConnectPeer(const Session& session) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void Answer(Session& session, const PeerImageEvent& event) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // Has workers killed that have not answered about their copies.
  void KillLate(absl::Time now) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  absl::StatusOr<PeerMemory> MakePeerMemory(uint32_t slabs);
  void ReleasePeerMemory(Session& session) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void Drain();
  void Execute(std::vector<Work>& batch);
  void Record(const std::vector<Work>& batch);
  void AppendOrDie(const std::vector<journal::Record>& records);
  void Do(const Work& work, const SendAttached& attached);
  // Attached.image_bytes_per_second.
  double ImageBytesPerSecond();
  void Do(const Work& work, const ArbiterAction& action);
  void Do(const Work& work, const PeerImages::Offer& offer);
  void Do(const Work&, const PeerMemory&) {}
  void Perform(const Work& work, const SendGrant& grant);
  void Perform(const Work& work, const SendRevoke& revoke);
  void Perform(const Work& work, const SendSetRotation& rotation);
  void Perform(const Work& work, const SendActivateRefused& refused);
  void Perform(const Work& work, const SendKvPressure& pressure);
  void Perform(const Work& work, const SendLinkLimit& limit);
  void Perform(const Work& work, const KillProcess& kill);
  void Perform(const Work& work, const CleanSlabs& clean);
  void Perform(const Work& work, const SessionEnded& ended);
  void Perform(const Work& work, const TransferFinished& transfer);
  void Perform(const Work& work, const SendTakeTurn& turn);
  void Perform(const Work& work, const SendEndTurn& turn);
  void SlabsClean(absl::Span<const SlabId> slabs);
  const std::string& TenantName(TenantId tenant) const {
    return options_.tenants[tenant.value()].name;
  }
  void FillStatus(v1::GetStatusResponse& out);
  void FillTenant(const TenantSnapshot& tenant, TenantId id, v1::TenantMemory& out)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  const Options options_;
  const Parts parts_;
  std::unique_ptr<ProcessWatcher> watcher_;
  std::unique_ptr<SlabCleaner> cleaner_;
  std::thread timer_;

  // Serialise calls that give one slab other memory; never taken with `mu_`.
  Mutex& DeviceLock(SlabId slab) { return device_mus_[slab.value() % device_mus_.size()]; }
  std::array<Mutex, 64> device_mus_;

  Mutex mu_;
  Arbiter arbiter_ ABSL_GUARDED_BY(mu_);
  PeerImages peers_ ABSL_GUARDED_BY(mu_);
  absl::flat_hash_map<SessionId, std::shared_ptr<Session>> sessions_ ABSL_GUARDED_BY(mu_);
  // Slabs of earlier generations whose descriptors have not come back.
  std::map<SlabId, journal::SlabGranted> lost_ ABSL_GUARDED_BY(mu_);
  // Pid and start of the processes that are being watched.
  std::set<std::pair<pid_t, uint64_t>> watched_ ABSL_GUARDED_BY(mu_);
  std::vector<Work> queue_ ABSL_GUARDED_BY(mu_);
  bool draining_ ABSL_GUARDED_BY(mu_) = false;
  // What the timer waits for.
  CondVar timer_changed_;
  absl::Time timer_deadline_ ABSL_GUARDED_BY(mu_) = absl::InfinitePast();
  bool stopping_ ABSL_GUARDED_BY(mu_) = false;
  std::deque<TransferFinished> transfers_ ABSL_GUARDED_BY(mu_);
};

}  // namespace palimpsest

#endif  // PALIMPSEST_BROKER_SERVER_BROKER_H_
