#include "worker/memory/grpc_memory_client.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "common/descriptor_limit.h"
#include "common/log.h"
#include "common/monotonic_time.h"
#include "common/random.h"

namespace palimpsest {
namespace {

constexpr uint32_t kMaxPoolSlabs = 1 << 24;
constexpr Bytes kMaxSlab = GiB(1);
constexpr Bytes kPage = KiB(4);
constexpr size_t kFingerprintBytes = 32;
// Connections, the image, files: besides those of slabs.
constexpr uint64_t kOtherDescriptors = 1024;

absl::Status BadAttached(absl::string_view why) {
  return absl::InvalidArgumentError(absl::StrCat("the broker's Attached makes no sense: ", why));
}

// That sizes fit each other, so that nothing below has to ask again.
absl::Status CheckAttached(const v1::Attached& attached, const MemoryBackend& memory) {
  const std::string backend = memory.name();
  if (attached.backend() != backend) {
    return absl::FailedPreconditionError(absl::StrCat(
        "the broker's slabs are of back-end \"", attached.backend(), "\", this worker's of \"",
        backend, "\": set pool.backend at the broker and engine.device here alike"));
  }
  const uint64_t slab = attached.slab_bytes();
  if (slab == 0 || slab > static_cast<uint64_t>(kMaxSlab.count()) ||
      slab % static_cast<uint64_t>(kPage.count()) != 0) {
    return BadAttached(absl::StrCat("slabs of ", slab, " bytes"));
  }
  if (attached.pool_slabs() == 0 || attached.pool_slabs() > kMaxPoolSlabs) {
    return BadAttached(absl::StrCat("a pool of ", attached.pool_slabs(), " slabs"));
  }
  if (attached.workspace_slabs() > attached.pool_slabs()) {
    return BadAttached(absl::StrCat("a workspace of ", attached.workspace_slabs(), " slabs"));
  }
  const v1::ImageManifest& image = attached.image();
  const auto ranks = static_cast<uint64_t>(memory.ranks());
  if (image.ranks() != ranks) {
    return absl::FailedPreconditionError(
        absl::StrCat("the broker's slabs lie on ", image.ranks(), " GPUs, this worker has ", ranks,
                     ": list as many in pool.gpus at the broker as in engine.gpus here"));
  }
  const uint64_t slabs = static_cast<uint64_t>(image.slab_checksums_size()) / ranks;
  if (static_cast<uint64_t>(image.slab_checksums_size()) % ranks != 0 ||
      image.slab_bytes() != slab || slabs == 0 || slabs > kMaxPoolSlabs ||
      image.image_bytes() != slabs * slab) {
    return BadAttached(absl::StrCat("an image of ", image.image_bytes(), " bytes in ", slabs,
                                    " slabs of ", image.slab_bytes()));
  }
  if (image.fingerprint().size() != kFingerprintBytes) {
    return BadAttached(absl::StrCat("a fingerprint of ", image.fingerprint().size(), " bytes"));
  }
  uint64_t next = 0;
  for (const v1::ImageStage& stage : image.stages()) {
    if (stage.first_slab() != next || stage.slab_count() == 0) {
      return BadAttached(absl::StrCat("stage '", stage.name(), "' leaves a gap or is empty"));
    }
    next += stage.slab_count();
  }
  if (next != slabs) return BadAttached("the stages do not cover the image");
  return absl::OkStatus();
}

// Whether another try may succeed where this one failed.
bool MayPass(const absl::Status& status) {
  switch (status.code()) {
    case absl::StatusCode::kPermissionDenied:
    case absl::StatusCode::kInvalidArgument:
    case absl::StatusCode::kFailedPrecondition:
    case absl::StatusCode::kNotFound:
    case absl::StatusCode::kUnimplemented:
      return false;
    default:
      return true;
  }
}

}  // namespace

GrpcMemoryClient::GrpcMemoryClient(Options options)
    : options_(std::move(options)),
      host_(options_.restore_threads),
      backend_(options_.backend == nullptr ? host_ : *options_.backend),
      pacer_([this](LinkPacer::Kind kind, absl::Duration waited) {
        prometheus::Counter* const counter = kind == LinkPacer::Kind::kRestore
                                                 ? instruments_.restores_held_back
                                                 : instruments_.blocks_held_back;
        if (counter != nullptr) counter->Increment(absl::ToDoubleSeconds(waited));
      }),
      jitter_(static_cast<uint32_t>(RandomSeed())) {
  if (options_.metrics == nullptr) return;
  Metrics& metrics = *options_.metrics;
  instruments_ = {
      .fetch_parameter = &metrics.Histogram<"palimpsest_worker_fetch_seconds">("parameter"),
      .fetch_kv = &metrics.Histogram<"palimpsest_worker_fetch_seconds">("kv"),
      .map_parameter = &metrics.Histogram<"palimpsest_worker_map_seconds">("parameter"),
      .map_kv = &metrics.Histogram<"palimpsest_worker_map_seconds">("kv"),
      .restore = &metrics.Histogram<"palimpsest_worker_restore_seconds">(),
      .gate_wait = &metrics.Histogram<"palimpsest_worker_gate_wait_seconds">(),
      .restored_bytes = &metrics.Counter<"palimpsest_worker_restored_bytes_total">(),
      .rotation_bytes = &metrics.Counter<"palimpsest_worker_rotation_bytes_total">(),
      .peer_image_bytes = &metrics.Gauge<"palimpsest_worker_peer_image_bytes">(),
      .peer_filled_bytes = &metrics.Counter<"palimpsest_worker_peer_filled_bytes_total">(),
      .peer_fill_seconds = &metrics.Counter<"palimpsest_worker_peer_fill_seconds_total">(),
      .restores_held_back =
          &metrics.Counter<"palimpsest_worker_link_wait_seconds_total">("restore"),
      .blocks_held_back = &metrics.Counter<"palimpsest_worker_link_wait_seconds_total">("blocks"),
      .checksum_failures = &metrics.Counter<"palimpsest_worker_checksum_failures_total">(),
      .reconnects = &metrics.Counter<"palimpsest_worker_broker_reconnects_total">(),
      .connected = &metrics.Gauge<"palimpsest_worker_broker_connected">(),
  };
}

absl::StatusOr<std::unique_ptr<GrpcMemoryClient>> GrpcMemoryClient::Connect(Options options) {
  std::unique_ptr<GrpcMemoryClient> client(new GrpcMemoryClient(std::move(options)));
  const absl::Time give_up = MonotonicNow() + client->options_.connect_timeout;
  absl::Duration backoff = client->options_.min_backoff;
  for (;;) {
    auto connection = std::make_shared<BrokerConnection>(client->options_.connection);
    absl::StatusOr<v1::Attached> attached = connection->Open(nullptr);
    absl::Status status = attached.status();
    if (status.ok()) {
      status = client->Start(std::move(connection), *attached);
      if (status.ok()) status = client->AwaitWorkspace(give_up);
      if (status.ok()) return client;
      return status;
    }
    if (!MayPass(status)) return status;
    if (MonotonicNow() + backoff > give_up) {
      return absl::UnavailableError(absl::StrCat(
          "no session with the broker at ", client->options_.connection.address, " within ",
          absl::FormatDuration(client->options_.connect_timeout), ": ", status.message()));
    }
    absl::SleepFor(backoff);
    backoff = std::min(backoff * 2, client->options_.max_backoff);
  }
}

absl::Status GrpcMemoryClient::Start(std::shared_ptr<BrokerConnection> connection,
                                     const v1::Attached& attached) {
  if (absl::Status status = CheckAttached(attached, backend_); !status.ok()) return status;
  manifest_ = attached.image();
  if (options_.check_manifest) {
    if (absl::Status status = options_.check_manifest(manifest_); !status.ok()) return status;
  }
  // Of every slab that it may ever hold or keep.
  const uint64_t descriptors = uint64_t{attached.pool_slabs()} * static_cast<uint64_t>(ranks()) +
                               static_cast<uint64_t>(manifest_.slab_checksums_size());
  if (absl::Status status = ReserveDescriptors(descriptors + kOtherDescriptors); !status.ok()) {
    return status;
  }
  slab_bytes_ = Bytes(static_cast<int64_t>(attached.slab_bytes()));
  quota_slabs_ = static_cast<int32_t>(std::min(attached.quota_slabs(), attached.pool_slabs()));
  swaps_ = attached.preemption() == v1::PREEMPTION_SWAP;
  has_tiers_ = !attached.block_token().empty();
  hibernate_after_ = absl::Seconds(std::max(attached.hibernate_after_seconds(), 0.0));

  absl::StatusOr<UniqueFd> image = connection->FetchImage(attached.image_token());
  if (!image.ok()) return image.status();
  ImageShape shape{
      .slab_bytes = slab_bytes_,
      .checksums = {manifest_.slab_checksums().begin(), manifest_.slab_checksums().end()},
      .stages = {},
      .verify = options_.verify_parameters,
      .ranks = backend_.ranks()};
  for (const v1::ImageStage& stage : manifest_.stages()) {
    stages_.push_back({stage.first_slab(), stage.slab_count()});
    shape.stages.push_back(stage.first_slab());
  }
  absl::StatusOr<std::unique_ptr<ImageRestorer>> restorer =
      backend_.OpenImage(*std::move(image), shape);
  if (!restorer.ok()) return restorer.status();
  restorer_ = *std::move(restorer);
  if (absl::Status status = ReserveRegions(attached); !status.ok()) return status;
  MakeGate();
  {
    MutexLock lock(&mu_);
    slabs_.emplace(stages_, gate_.get());
    connection_ = std::move(connection);
    SessionAttached(attached, /*reattached=*/false);
  }
  link_ = std::thread([this] { LinkLoop(); });
  writer_ = std::thread([this] { WriterLoop(); });
  mapper_ = std::thread([this] { MapperLoop(); });
  restore_thread_ = std::thread([this] { RestorerLoop(); });
  return absl::OkStatus();
}

void GrpcMemoryClient::MakeGate() {
  if (restorer_->copies_slabs()) {
    SlotCopier::Options options;
    options.restorer = restorer_.get();
    options.base = parameters_->base();
    options.slab_bytes = slab_bytes_;
    options.stages = stages_;
    options.patience = options_.gate_patience;
    options.on_copied = [this](Bytes bytes, absl::Duration time) {
      if (instruments_.rotation_bytes != nullptr) {
        instruments_.rotation_bytes->Increment(static_cast<double>(bytes.count()));
      }
      MutexLock lock(&mu_);
      rotation_bytes_ += bytes;
      Copied(bytes, time);
    };
    options.on_failure = [this](const absl::Status& status) {
      if (instruments_.checksum_failures != nullptr) instruments_.checksum_failures->Increment();
      Fatal(status);
    };
    slot_copier_ = std::make_unique<SlotCopier>(std::move(options));
  }
  gate_ = std::make_unique<ParameterGateImpl>(
      static_cast<int>(stages_.size()), options_.gate_patience,
      [this](absl::Duration waited) {
        if (instruments_.gate_wait != nullptr) {
          instruments_.gate_wait->Observe(absl::ToDoubleSeconds(waited));
        }
      },
      [this](int stage, int rank) { return restorer_->StageEvent(stage, rank); },
      slot_copier_.get());
}

absl::Status GrpcMemoryClient::ReserveRegions(const v1::Attached& attached) {
  const auto image = static_cast<uint32_t>(manifest_.slab_checksums_size() / backend_.ranks());
  auto parameters = backend_.Reserve(image, slab_bytes_);
  if (!parameters.ok()) return parameters.status();
  parameters_ = std::make_unique<SlabRegion>(*std::move(parameters), 0, image, slab_bytes_);
  const uint32_t pool = attached.pool_slabs();
  auto kv = backend_.Reserve(pool + attached.workspace_slabs(), slab_bytes_);
  if (!kv.ok()) return kv.status();
  kv_ = std::make_unique<SlabRegion>(*kv, 0, pool, slab_bytes_);
  workspace_ = std::make_unique<SlabRegion>(*kv, pool, attached.workspace_slabs(), slab_bytes_);
  return absl::OkStatus();
}

absl::Status GrpcMemoryClient::AwaitWorkspace(absl::Time deadline) {
  MutexLock lock(&mu_);
  while (workspace_->mapped() < static_cast<int32_t>(workspace_->places())) {
    if (changed_.WaitWithDeadline(&mu_, deadline)) {
      return absl::UnavailableError(
          absl::StrCat("the broker granted ", workspace_->mapped(), " of ", workspace_->places(),
                       " workspace slabs within ", absl::FormatDuration(options_.connect_timeout),
                       ": is an earlier worker of the tenant still ending?"));
    }
  }
  return absl::OkStatus();
}

GrpcMemoryClient::~GrpcMemoryClient() { Stop(); }

void GrpcMemoryClient::Stop() {
  std::shared_ptr<BrokerConnection> connection;
  {
    MutexLock lock(&mu_);
    stopping_ = true;
    connection = connection_;
    changed_.SignalAll();
  }
  pacer_.Open();
  if (gate_ != nullptr) gate_->Fail(absl::CancelledError("the worker shuts down"));
  if (connection != nullptr) connection->Shutdown();
  for (std::thread* thread : {&link_, &writer_, &mapper_, &restore_thread_}) {
    if (thread->joinable()) thread->join();
  }
}

void GrpcMemoryClient::Detach() {
  pacer_.Open();
  gate_->Fail(absl::CancelledError("the worker has detached"));
  {
    MutexLock lock(&mu_);
    detaching_ = true;  // nothing is mapped or restored from now on
    changed_.SignalAll();
    while (mapping_ || restoring_ || !map_tasks_.empty()) changed_.Wait(&mu_);
  }
  if (slot_copier_ != nullptr) slot_copier_->Stop();
  for (SlabRegion* region : {parameters_.get(), kv_.get(), workspace_.get()}) {
    if (absl::Status status = region->UnmapAll(); !status.ok()) {
      Log(LogLevel::kError, "slabs stay mapped until the process ends", {{"status", status}});
    }
  }
  backend_.DropKept();
  {
    const absl::Time deadline = MonotonicNow() + options_.detach_timeout;
    MutexLock lock(&mu_);
    v1::WorkerMessage message;
    message.mutable_detach();
    Send(std::move(message));
    // The broker ends the stream when it has taken note.
    while (connected_ && !changed_.WaitWithDeadline(&mu_, deadline)) {
    }
  }
  Stop();
}

void GrpcMemoryClient::Push(MemoryEvent event) { events_.push_back(std::move(event)); }

void GrpcMemoryClient::Wake() {
  std::function<void()> wake;
  {
    MutexLock lock(&mu_);
    wake = wake_;
  }
  if (wake) wake();
}

std::vector<MemoryEvent> GrpcMemoryClient::TakeEvents() {
  MutexLock lock(&mu_);
  return std::exchange(events_, {});
}

void GrpcMemoryClient::SetWakeup(std::function<void()> wake) {
  {
    MutexLock lock(&mu_);
    wake_ = std::move(wake);
    if (events_.empty()) return;
  }
  Wake();
}

bool GrpcMemoryClient::ParametersAvailable() const {
  MutexLock lock(&mu_);
  return slabs_->Available();
}

MappedSlabs GrpcMemoryClient::Mapped() const {
  MutexLock lock(&mu_);
  return {static_cast<int32_t>(slabs_->restored()), static_cast<int32_t>(slabs_->size()),
          kv_->mapped(), static_cast<int32_t>(slots_.size()),
          static_cast<int32_t>(rotation_.stages.size())};
}

void GrpcMemoryClient::RequestActivation(ActivationReason reason) {
  MutexLock lock(&mu_);
  if (slabs_->Available() || settling_ > 0) return;
  if (activation_.has_value() && (*activation_ == reason || reason == ActivationReason::kEager)) {
    return;
  }
  activation_ = reason;
  SendActivation();
}

void GrpcMemoryClient::SendActivation() {
  v1::WorkerMessage message;
  message.mutable_activate()->set_reason(*activation_ == ActivationReason::kRequest
                                             ? v1::Activate::REASON_REQUEST
                                             : v1::Activate::REASON_EAGER);
  Send(std::move(message));
}

void GrpcMemoryClient::SetKvTarget(int32_t target_slabs, int32_t needed_slabs) {
  v1::SetKvTarget target;
  target.set_target_slabs(static_cast<uint32_t>(std::clamp(target_slabs, 0, pool_slabs())));
  target.set_needed_slabs(static_cast<uint32_t>(
      std::clamp(needed_slabs, 0, static_cast<int32_t>(target.target_slabs()))));
  MutexLock lock(&mu_);
  if (kv_target_.has_value() && kv_target_->target_slabs() == target.target_slabs() &&
      kv_target_->needed_slabs() == target.needed_slabs()) {
    return;
  }
  kv_target_ = target;
  kv_target_sent_ = false;
  changed_.SignalAll();
}

void GrpcMemoryClient::FinishKvRevoke(RevokeId id, absl::Span<const RegionIndex> indexes) {
  MutexLock lock(&mu_);
  GiveKv task{std::nullopt, {indexes.begin(), indexes.end()}};
  // Unknown: the session of that revoke is over, and its slabs are given back unasked.
  if (revokes_.erase(id) > 0) task.revoke = id;
  map_tasks_.push_back(std::move(task));
  changed_.SignalAll();
}

void GrpcMemoryClient::FinishParameterRevoke(RevokeId id) {
  MutexLock lock(&mu_);
  const auto found = revokes_.find(id);
  if (found == revokes_.end()) return;  // void: the slabs stay
  map_tasks_.push_back(GiveParameters{id, std::move(found->second.indexes)});
  revokes_.erase(found);
  changed_.SignalAll();
}

void GrpcMemoryClient::FinishRotation(RotationId id) {
  MutexLock lock(&mu_);
  ++settling_;
  if (id == kImageMoves) {
    FinishImageMove();
  } else if (wanted_rotation_.has_value() && wanted_rotation_->id == id) {
    map_tasks_.push_back(*std::move(wanted_rotation_));
    wanted_rotation_.reset();
  } else {
    Settle(id, /*changed=*/false);
  }
  changed_.SignalAll();
}

void GrpcMemoryClient::FinishTurn(TurnId id) {
  MutexLock lock(&mu_);
  if (ending_turn_ != id) return;  // asked for in a session that is over
  ending_turn_.reset();
  v1::WorkerMessage message;
  message.mutable_turn_ended()->set_turn_id(id.value());
  Send(std::move(message));
}

void GrpcMemoryClient::ReleaseKv(absl::Span<const RegionIndex> indexes) {
  if (indexes.empty()) return;
  MutexLock lock(&mu_);
  map_tasks_.push_back(GiveKv{std::nullopt, {indexes.begin(), indexes.end()}});
  changed_.SignalAll();
}

void GrpcMemoryClient::SendReport(const WorkerLoad& load) {
  MutexLock lock(&mu_);
  if (load_ == load) return;
  if (!load_.has_value() || load_->active != load.active) load_time_ = absl::InfinitePast();
  load_ = load;
  load_sent_ = false;
  changed_.SignalAll();
}

void GrpcMemoryClient::SetContextBytes(Bytes bytes) {
  MutexLock lock(&mu_);
  context_bytes_ = bytes;
}

}  // namespace palimpsest
