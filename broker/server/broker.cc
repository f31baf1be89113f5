#include "broker/server/broker.h"

#include <algorithm>
#include <utility>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "broker/server/worker_messages.h"
#include "common/log.h"

namespace palimpsest {
namespace {

constexpr size_t kRetireBatch = 16;
// Little enough that the next owner maps some slabs while the rest is scrubbed.
constexpr Bytes kScrubBatch = MiB(256);
constexpr absl::Duration kMemoryPause = absl::Milliseconds(50);

// Of the image; as far as its worker can let layers rotate.
std::vector<ParameterStage> StagesFor(const SealedImage& image, bool rotates) {
  std::vector<ParameterStage> stages = image.stages;
  for (ParameterStage& stage : stages) stage.may_rotate = stage.may_rotate && rotates;
  return stages;
}

ProcessIdentity IdentityOf(const journal::SessionOpened& session) {
  return ProcessIdentity{session.pid(), session.process_start()};
}

}  // namespace

absl::StatusOr<std::unique_ptr<Broker>> Broker::Create(Options options, Parts parts) {
  options.arbiter.generation = parts.journal.generation();
  std::unique_ptr<Broker> broker(new Broker(std::move(options), std::move(parts)));
  if (absl::Status status = broker->AdoptJournal(); !status.ok()) return status;
  return broker;
}

Broker::Broker(Options options, Parts parts)
    : options_(std::move(options)),
      parts_(std::move(parts)),
      arbiter_(options_.arbiter),
      peers_({.slabs = options_.peer_slabs,
              .fill_deadline = options_.arbiter.grant_deadline,
              .return_deadline = options_.arbiter.revoke_deadline}) {}

Broker::~Broker() { Stop(); }

absl::Status Broker::AdoptJournal() {
  const JournalState& recovered = parts_.journal.recovered();
  const auto slab_bytes = static_cast<uint64_t>(options_.slab_bytes.count());
  if (!recovered.sessions.empty() && recovered.generation.slab_bytes() != slab_bytes) {
    return absl::FailedPreconditionError(absl::StrCat(
        "pool.slab_bytes changed from ", recovered.generation.slab_bytes(), " to ", slab_bytes,
        " while ", recovered.sessions.size(), " workers hold slabs: change it back, or stop them"));
  }
  MutexLock lock(&mu_);
  for (const TenantConfig& tenant : options_.tenants) {
    if (const auto added = arbiter_.AddTenant(tenant); !added.ok()) return added.status();
  }
  std::vector<JournalSession> adopted;
  for (const auto& [id, opened] : recovered.sessions) {
    auto session = std::make_shared<Session>();
    session->id = id;
    session->tenant_name = opened.tenant();
    session->fingerprint = opened.fingerprint();
    for (size_t i = 0; i < options_.tenants.size(); ++i) {
      if (options_.tenants[i].name == opened.tenant()) session->tenant = TenantId(i);
    }
    absl::StatusOr<ProcessHandle> process = ProcessHandle::Open(IdentityOf(opened));
    if (process.ok()) {
      session->process = std::make_shared<const ProcessHandle>(std::move(*process));
    } else if (!absl::IsNotFound(process.status())) {
      return process.status();
    }
    sessions_[id] = session;
    adopted.push_back(JournalSession{id, session->tenant, {}});
    for (const auto& [slab, granted] : recovered.slabs) {
      if (granted.session_id() != id.value()) continue;
      adopted.back().slabs.push_back(HeldSlab{slab, Epoch(granted.epoch()),
                                              RoleFromNumber(static_cast<int>(granted.role())),
                                              RegionIndex(granted.region_index())});
      lost_[slab] = granted;
    }
  }
  const absl::Time now = parts_.clock.Now();
  if (absl::Status status = arbiter_.AdoptFromJournal(adopted, now); !status.ok()) {
    return absl::Status(
        status.code(),
        absl::StrCat("the journal does not fit the configuration: ", status.message(),
                     "; change it back, or stop all workers of this node first"));
  }
  std::vector<SessionId> gone;
  for (const auto& [id, session] : sessions_) {
    if (session->process == nullptr) gone.push_back(id);
  }
  for (const SessionId id : gone) arbiter_.OnProcessGone(id, now);
  Collect();
  return absl::OkStatus();
}

absl::Status Broker::CreateSlabs(absl::Span<const SlabId> slabs) {
  const absl::Time deadline = parts_.clock.Now() + options_.memory_patience;
  for (const SlabId slab : slabs) {
    absl::Status status = parts_.device.Create(slab);
    while (absl::IsResourceExhausted(status) && parts_.clock.Now() < deadline) {
      absl::SleepFor(kMemoryPause);
      status = parts_.device.Create(slab);
    }
    if (!status.ok()) return status;
  }
  return absl::OkStatus();
}

std::vector<absl::Status> Broker::CleanSlabMemory(absl::Span<const SlabId> slabs) {
  if (options_.cleaning == Options::Cleaning::kScrub) {
    // Against a dying worker that returns one of them at the same time: a slab is mapped once.
    return std::vector<absl::Status>(slabs.size(), parts_.device.Scrub(slabs));
  }
  std::vector<absl::Status> results;
  for (const SlabId slab : slabs) {
    MutexLock lock(&DeviceLock(slab));
    results.push_back(parts_.device.Retire(slab));
  }
  return results;
}

absl::Status Broker::Start() {
  std::vector<SlabId> missing;
  std::vector<std::shared_ptr<const ProcessHandle>> processes;
  {
    MutexLock lock(&mu_);
    for (uint32_t i = 0; i < options_.arbiter.pool_slabs; ++i) {
      if (!parts_.journal.recovered().slabs.contains(SlabId(i))) missing.push_back(SlabId(i));
    }
    for (const auto& [id, session] : sessions_) {
      if (session->process != nullptr) processes.push_back(session->process);
    }
  }
  if (absl::Status status = CreateSlabs(missing); !status.ok()) return status;
  absl::StatusOr<std::unique_ptr<ProcessWatcher>> watcher = ProcessWatcher::Start();
  if (!watcher.ok()) return watcher.status();
  watcher_ = std::move(*watcher);
  cleaner_ = std::make_unique<SlabCleaner>(
      SlabCleaner::Options{.threads = options_.cleaner_threads,
                           .batch = options_.cleaning == Options::Cleaning::kScrub
                                        ? static_cast<size_t>(std::max<int64_t>(
                                              kScrubBatch / options_.slab_bytes, 1))
                                        : kRetireBatch},
      [this](absl::Span<const SlabId> slabs) { return CleanSlabMemory(slabs); },
      [this](absl::Span<const SlabId> slabs) { SlabsClean(slabs); });
  for (const std::shared_ptr<const ProcessHandle>& process : processes) {
    if (absl::Status status = WatchOnce(process); !status.ok()) return status;
  }
  timer_ = std::thread([this] { TimerLoop(); });
  Drain();
  return absl::OkStatus();
}

void Broker::Stop() {
  std::vector<std::shared_ptr<SessionStream>> streams;
  {
    MutexLock lock(&mu_);
    if (std::exchange(stopping_, true)) return;
    timer_changed_.SignalAll();
    for (const auto& [id, session] : sessions_) {
      if (session->stream != nullptr) streams.push_back(session->stream);
    }
  }
  for (const auto& stream : streams) stream->Close("the broker is shutting down");
  if (timer_.joinable()) timer_.join();
  if (watcher_ != nullptr) watcher_->Stop();
  if (cleaner_ != nullptr) cleaner_->Stop();
}

void Broker::TimerLoop() {
  while (true) {
    {
      MutexLock lock(&mu_);
      while (true) {
        if (stopping_) return;
        const absl::Time now = parts_.clock.Now();
        timer_deadline_ = std::min(arbiter_.NextDeadline(), peers_.NextDeadline());
        if (timer_deadline_ <= now) {
          arbiter_.OnTick(now);
          KillLate(now);
          Collect();
          break;
        }
        timer_changed_.WaitWithTimeout(&mu_, timer_deadline_ - now);
      }
    }
    Drain();
  }
}

absl::Status Broker::WatchOnce(const std::shared_ptr<const ProcessHandle>& process) {
  const ProcessIdentity identity = process->identity();
  {
    MutexLock lock(&mu_);
    if (!watched_.emplace(identity.pid, identity.start_ticks).second) return absl::OkStatus();
  }
  absl::Status status = watcher_->Watch(process, [this, identity] { ProcessGone(identity); });
  if (status.ok()) return status;
  MutexLock lock(&mu_);
  watched_.erase({identity.pid, identity.start_ticks});
  return status;
}

void Broker::ProcessGone(const ProcessIdentity& process) {
  Decide([&](absl::Time now) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    watched_.erase({process.pid, process.start_ticks});
    std::vector<SessionId> ended;
    for (const auto& [id, session] : sessions_) {
      if (session->process != nullptr && session->process->identity() == process) {
        ended.push_back(id);
      }
    }
    for (const SessionId id : ended) {
      Log(LogLevel::kInfo, "worker process gone",
          {{"tenant", sessions_[id]->tenant_name}, {"session", id}, {"pid", process.pid}});
      arbiter_.OnProcessGone(id, now);
    }
  });
}

absl::Status Broker::CheckVacant(const DescriptorPeer& peer) {
  MutexLock lock(&mu_);
  for (const auto& [id, session] : sessions_) {
    if (session->tenant != peer.tenant) continue;
    return absl::AlreadyExistsError(absl::StrCat(
        "process ", session->process == nullptr ? 0 : session->process->pid(),
        " has the session of tenant ", session->tenant_name,
        ": a tenant has one worker, and its process must be gone before another attaches"));
  }
  return absl::OkStatus();
}

absl::StatusOr<std::shared_ptr<Broker::Session>> Broker::Attach(
    const DescriptorPeer& peer, std::shared_ptr<const SealedImage> image,
    std::shared_ptr<SessionStream> stream, bool rotates) {
  absl::Status status = CheckVacant(peer);
  // Watched first, so that no session can exist whose end nobody notices.
  if (status.ok()) status = WatchOnce(peer.process);
  if (!status.ok()) return status;
  auto session = std::make_shared<Session>();
  session->tenant = peer.tenant;
  session->tenant_name = TenantName(peer.tenant);
  session->process = peer.process;
  session->fingerprint = image->fingerprint;
  session->rotates = rotates;
  session->image = image;
  session->stream = std::move(stream);
  Decide([&](absl::Time now) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    const absl::StatusOr<SessionId> id =
        arbiter_.OnAttach(peer.tenant, StagesFor(*image, rotates), now);
    status = id.status();
    if (!status.ok()) return;
    session->id = *id;
    sessions_[*id] = session;
    queue_.push_back(Work{SendAttached{.recorded = false, .send_image = true, .image = image},
                          session, session->stream});
    ConnectPeer(*session);
  });
  if (!status.ok()) return status;
  // Its end may have been reported before the session existed.
  if (peer.process->Exited()) ProcessGone(peer.process->identity());
  return session;
}

absl::Status Broker::CheckReturned(SessionId session, absl::Span<const HeldSlab> held) {
  for (const HeldSlab& slab : held) {
    const auto lost = lost_.find(slab.slab);
    if (lost == lost_.end() || lost->second.session_id() != session.value()) continue;
    return absl::FailedPreconditionError(absl::StrCat(
        "slab ", slab.slab.ToString(),
        " is claimed, but its descriptor was not returned over the descriptor socket before"));
  }
  return absl::OkStatus();
}

absl::StatusOr<std::shared_ptr<Broker::Session>> Broker::FindReturning(
    const DescriptorPeer& peer, const v1::Reattach& message) {
  const absl::StatusOr<std::vector<HeldSlab>> held =
      CheckedHeldSlabs(message, options_.arbiter.pool_slabs);
  if (!held.ok()) return held.status();
  const SessionId session(message.session_id());
  MutexLock lock(&mu_);
  const auto found = sessions_.find(session);
  if (found == sessions_.end()) {
    return absl::NotFoundError(
        absl::StrCat("session ", session.ToString(), " is not known here: start the worker anew"));
  }
  const Session& known = *found->second;
  if (known.process == nullptr || known.process->identity() != peer.process->identity() ||
      known.tenant != peer.tenant) {
    return absl::PermissionDeniedError(
        absl::StrCat("session ", session.ToString(), " belongs to another process"));
  }
  if (absl::Status status = CheckReturned(session, *held); !status.ok()) return status;
  return found->second;
}

absl::Status Broker::Reattach(const std::shared_ptr<Session>& session, const v1::Attach& message,
                              std::shared_ptr<const SealedImage> image,
                              std::shared_ptr<SessionStream> stream) {
  const absl::StatusOr<std::vector<HeldSlab>> held =
      CheckedHeldSlabs(message.reattach(), options_.arbiter.pool_slabs);
  if (!held.ok()) return held.status();
  const absl::StatusOr<Rotation> rotation = CheckedRotation(message.reattach().rotation());
  if (!rotation.ok()) return rotation.status();
  absl::Status status;
  std::shared_ptr<SessionStream> earlier;
  Decide([&](absl::Time now) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    status = CheckReturned(session->id, *held);
    if (!status.ok()) return;
    earlier = std::exchange(session->stream, nullptr);
    if (earlier != nullptr) {
      arbiter_.OnConnectionLost(session->id, now);
      peers_.Disconnect(session->id);
    }
    status = arbiter_.OnReattach(session->id, *session->tenant,
                                 StagesFor(*image, message.rotates()), *held, *rotation, now);
    if (!status.ok()) return;
    session->rotates = message.rotates();
    session->stream = stream;
    session->image = image;
    // What the worker did not bring back is replaced when it is cleaned.
    std::erase_if(lost_, [&session](const auto& slab) {
      return slab.second.session_id() == session->id.value();
    });
    queue_.push_back(
        Work{SendAttached{
                 .recorded = true, .send_image = !message.reattach().has_image(), .image = image},
             session, stream});
    ReleasePeerMemory(*session);
    ConnectPeer(*session);
  });
  if (earlier != nullptr) earlier->Close("the worker opened another connection");
  return status;
}

absl::Status Broker::Handle(const std::shared_ptr<Session>& session,
                            const std::shared_ptr<SessionStream>& stream,
                            const v1::WorkerMessage& message) {
  const absl::StatusOr<WorkerEvent> event =
      ParseWorkerMessage(message, options_.arbiter.pool_slabs);
  if (!event.ok()) return event.status();
  if (const auto* unmapped = std::get_if<ChunksUnmappedEvent>(&*event)) {
    if (parts_.blocks != nullptr) {
      parts_.blocks->ChunksUnmapped(session->id, *stream, unmapped->chunks);
    }
    return absl::OkStatus();
  }
  Decide([&](absl::Time now) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    if (session->stream == stream) Apply(*session, *event, now);
  });
  return absl::OkStatus();
}

void Broker::Apply(Session& from, const WorkerEvent& event, absl::Time now) {
  const SessionId session = from.id;
  if (const auto* activate = std::get_if<ActivateEvent>(&event)) {
    arbiter_.OnActivate(session, activate->reason, now);
  } else if (const auto* target = std::get_if<KvTargetEvent>(&event)) {
    arbiter_.OnSetKvTarget(session, target->target_slabs, target->needed_slabs, now);
  } else if (const auto* done = std::get_if<RevokeDoneEvent>(&event)) {
    if (done->more) {
      arbiter_.OnRevokePart(session, done->revoke, done->slabs, now);
    } else {
      arbiter_.OnRevokeDone(session, done->revoke, done->slabs, now);
    }
  } else if (const auto* release = std::get_if<ReleaseKvEvent>(&event)) {
    arbiter_.OnReleaseKv(session, release->slabs, now);
  } else if (const auto* mapped = std::get_if<GrantMappedEvent>(&event)) {
    arbiter_.OnGrantMapped(session, mapped->grant, mapped->map, mapped->restore, now);
  } else if (const auto* rotated = std::get_if<RotationDoneEvent>(&event)) {
    arbiter_.OnRotationDone(session, rotated->rotation, now);
  } else if (const auto* peer = std::get_if<PeerImageEvent>(&event)) {
    Answer(from, *peer);
  } else if (const auto* load = std::get_if<SessionLoad>(&event)) {
    arbiter_.OnReport(session, *load, now);
  } else if (const auto* ended = std::get_if<TurnEndedEvent>(&event)) {
    arbiter_.OnTurnEnded(session, ended->turn, now);
  } else if (std::holds_alternative<DetachEvent>(event)) {
    arbiter_.OnDetach(session, now);
  }
}

void Broker::Disconnect(const std::shared_ptr<Session>& session,
                        const std::shared_ptr<SessionStream>& stream) {
  Decide([&](absl::Time now) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    if (session->stream != stream) return;
    session->stream = nullptr;
    arbiter_.OnConnectionLost(session->id, now);
    peers_.Disconnect(session->id);
  });
}

absl::Status Broker::ReturnSlab(const DescriptorPeer& peer, const SlabEntry& entry,
                                SlabDescriptors memory) {
  const auto refuse = [&entry](absl::string_view why) {
    return absl::PermissionDeniedError(
        absl::StrCat("slab ", entry.slab_id.ToString(), " is not taken back: ", why));
  };
  // What was granted: as the journal says, or as the broker's own descriptor does.
  SlabDevice::Identity granted;
  bool is_lost = false;
  {
    MutexLock lock(&mu_);
    if (!arbiter_.ledger().Contains(entry.slab_id)) return refuse("the pool has no such slab");
    const SlabRecord& record = arbiter_.ledger().record(entry.slab_id);
    const auto owner = record.owner.has_value() ? sessions_.find(*record.owner) : sessions_.end();
    if (owner == sessions_.end() || owner->second->process == nullptr ||
        owner->second->process->identity() != peer.process->identity() ||
        owner->second->tenant != peer.tenant || record.epoch != entry.epoch) {
      return refuse("this process does not hold it under that epoch");
    }
    const auto lost = lost_.find(entry.slab_id);
    is_lost = lost != lost_.end();
    if (is_lost) granted = {lost->second.device(), lost->second.inode()};
  }
  if (!is_lost) granted = parts_.device.IdentityOf(entry.slab_id);
  const absl::Status same = parts_.device.CheckMemory(memory, granted);
  if (!same.ok()) return refuse(same.message());
  if (!is_lost) return absl::OkStatus();
  {
    // If its process dies meanwhile, the slab may have got fresh memory already: AlreadyExists.
    MutexLock lock(&DeviceLock(entry.slab_id));
    const absl::Status adopted = parts_.device.Adopt(entry.slab_id, std::move(memory), granted);
    if (!adopted.ok()) return adopted;
  }
  MutexLock lock(&mu_);
  lost_.erase(entry.slab_id);
  return absl::OkStatus();
}

absl::Status Broker::ReturnImage(const DescriptorPeer& peer, const std::string& fingerprint,
                                 UniqueFd image) {
  {
    MutexLock lock(&mu_);
    const bool holds = std::any_of(sessions_.begin(), sessions_.end(), [&](const auto& entry) {
      return entry.second->process != nullptr && entry.second->fingerprint == fingerprint &&
             entry.second->process->identity() == peer.process->identity();
    });
    if (!holds) {
      return absl::PermissionDeniedError("no session of this process restores from that image");
    }
  }
  const auto& images = parts_.journal.recovered().images;
  const auto recorded = images.find(fingerprint);
  if (recorded == images.end()) return absl::OkStatus();  // packed by this broker: it has it
  return parts_.images.Adopt(recorded->second, std::move(image));
}

void Broker::ConnectionClosed(const DescriptorPeer& peer) {
  std::shared_ptr<SessionStream> stream;
  {
    MutexLock lock(&mu_);
    for (const auto& [id, session] : sessions_) {
      if (session->stream != nullptr && session->stream->connection() == peer.connection) {
        stream = session->stream;
      }
    }
  }
  if (stream != nullptr) stream->Close("the worker closed its descriptor connection");
}

}  // namespace palimpsest
