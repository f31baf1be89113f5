// The memory client of a real worker: a session with the broker over gRPC and the descriptor
// socket.
//
// Ownership: owns both regions and every slab descriptor in them, the image mapping and the
// connection.
//
// Threads of its own:
//   link      connects, attaches, reads the session stream, and starts again with exponential
//   back-off
//             and jitter when it broke;
//   writer    sends what the others queue: answers in order, of targets and reports the latest;
//   mapper    fetches descriptors, maps and unmaps, in the order in which grants and answers came;
//   restorer  copies parameters from the image, stage after stage, and opens the gate behind
//   itself;
//             its own helpers copy in parallel; grants that were mapped meanwhile are its next turn
//             together;
//   slots     copies rotating layers ahead of their use (slot_copier.h); only in host memory.
// The engine only takes the lock for a moment. Slabs are unmapped by the mapper, after the engine
// said that nothing uses them; only then is the broker told.
//
// A copy of the image on another GPU (PeerImage in broker.proto) is filled and given up by the
// restorer, between two restores. To the engine it is a rotation that changes nothing: it has the
// runner stop copying, says so, and has it begin anew, from where the image lies then.
//
// When the broker is lost, everything stays mapped and usable, layers that rotate go on rotating.
// Open revokes are void (their stages open again), and so are rotations that the engine has not
// finished; grants that were not fetched are gone, as is a copy of the image. The next broker
// process gets the descriptors of all held slabs and of the image before Attach; then the KV
// target, a pending activation and the last load are stated again.
//
// What cannot be repaired is fatal (Options.on_fatal, once): the broker refuses the session, offers
// another image, the image's bytes do not match their checksums, or the slabs of a rotation cannot
// be mapped. The gate fails from then on, and the process should exit, which gives its memory back.
#ifndef PALIMPSEST_WORKER_MEMORY_GRPC_MEMORY_CLIENT_H_
#define PALIMPSEST_WORKER_MEMORY_GRPC_MEMORY_CLIENT_H_

#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <thread>
#include <variant>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "common/metrics.h"
#include "common/mutex.h"
#include "worker/memory/arena_link.h"
#include "worker/memory/broker_connection.h"
#include "worker/memory/host_memory.h"
#include "worker/memory/image_restorer.h"
#include "worker/memory/link_pacer.h"
#include "worker/memory/memory_client.h"
#include "worker/memory/parameter_gate.h"
#include "worker/memory/parameter_slabs.h"
#include "worker/memory/region_memory.h"
#include "worker/memory/regions.h"
#include "worker/memory/rotation_plan.h"
#include "worker/memory/slot_copier.h"

namespace palimpsest {

class GrpcMemoryClient : public MemoryClient, public ArenaLink {
 public:
  struct Options {
    BrokerConnection::Options connection;
    // Whether the image is the one that this worker's model needs; called once, before anything of
    // it is believed (worker/model/manifest.h).
    std::function<absl::Status(const v1::ImageManifest&)> check_manifest;
    // Whose slabs are mapped; outlives the client. Null: the host's, with this many threads that
    // copy parameters.
    MemoryBackend* backend = nullptr;
    int restore_threads = 2;
    // Whether restored parameters are hashed and compared.
    bool verify_parameters = true;
    // Slabs are given back in parts of this size, so that the broker cleans some while others are
    // unmapped.
    Bytes give_back_part = MiB(256);
    // How long Connect tries while there is no broker.
    absl::Duration connect_timeout = absl::Seconds(60);
    absl::Duration min_backoff = absl::Milliseconds(50);
    absl::Duration max_backoff = absl::Seconds(2);
    // Longest wait at the gate.
    absl::Duration gate_patience = absl::Seconds(60);
    // How long Detach waits for the broker to end the session.
    absl::Duration detach_timeout = absl::Seconds(5);
    // Called from a background thread; must not call back.
    std::function<void(const absl::Status&)> on_fatal;
    // May be null; otherwise of a worker process, and outlives the client.
    Metrics* metrics = nullptr;
  };

  // Attaches, maps the image and the workspace; blocks until then, which takes minutes when the
  // broker has to pack the image first. An error is final: no broker, or no workspace, within
  // connect_timeout (Unavailable), or a refusal.
  static absl::StatusOr<std::unique_ptr<GrpcMemoryClient>> Connect(Options options);

  // As Detach, if that was not called, but the broker is not told: it sees the process's end.
  ~GrpcMemoryClient() override;

  // Of the first Attached.
  const v1::ImageManifest& manifest() const { return manifest_; }
  Bytes slab_bytes() const { return slab_bytes_; }
  int32_t pool_slabs() const { return static_cast<int32_t>(kv_->places()); }
  int32_t quota_slabs() const { return quota_slabs_; }
  // Whether the KV of preempted sequences is to go to host memory (Attached.preemption).
  bool swaps() const { return swaps_; }
  // Whether the broker kept KV blocks in tiers when this worker started.
  bool has_tiers() const { return has_tiers_; }
  // Time without requests after which the process should end; zero: never.
  absl::Duration hibernate_after() const { return hibernate_after_; }
  // Memories that the model is spread over (MemoryBackend::ranks).
  int ranks() const { return backend_.ranks(); }
  // For ModelMemory: fixed addresses, on the GPU of that rank.
  const std::byte* parameters(int rank = 0) const { return parameters_->base(rank); }
  std::byte* kv(int rank = 0) const { return kv_->base(rank); }
  // Right behind the KV region of pool_slabs() places; mapped as long as the client lives. Empty if
  // the tenant has none.
  std::byte* workspace(int rank = 0) const { return workspace_->base(rank); }
  Bytes workspace_bytes() const { return slab_bytes_ * workspace_->places(); }
  std::vector<ImagePiece> image(int rank = 0) const { return restorer_->Pieces(rank); }

  // What copies KV blocks over the link of the parameters awaits its turns there. Lives as long as
  // the client.
  LinkPacer& pacer() { return pacer_; }

  // What this process takes of the GPU beside slabs, for the broker; goes with every report.
  void SetContextBytes(Bytes bytes);

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
  ParameterGate& gate() override { return *gate_; }
  void Detach() override;

  void SetArenaListener(ArenaListener* listener) override;
  void FetchChunk(uint64_t epoch, uint32_t chunk, std::string token) override;
  void ChunksUnmapped(uint64_t epoch, std::vector<uint32_t> chunks) override;

 private:
  struct MapGrant {
    uint64_t session_epoch = 0;
    v1::Grant grant;
    absl::Time arrival;
  };
  // `revoke` unset: ReleaseKv.
  struct GiveKv {
    std::optional<RevokeId> revoke;
    std::vector<RegionIndex> indexes;
  };
  struct GiveParameters {
    RevokeId revoke;
    std::vector<RegionIndex> indexes;
  };
  struct Rotate {
    RotationId id;
    Rotation rotation;
    std::vector<RotationMove> moves;
  };
  // Memory on another GPU for a copy of the image: the mapper fetches it, the restorer fills it.
  struct PeerOffer {
    uint64_t session_epoch = 0;
    uint64_t id = 0;
    uint32_t slabs = 0;
    std::string token;
    std::vector<SlabDescriptors> memory;
  };
  struct ChunkFetch {
    uint64_t session_epoch = 0;
    uint32_t chunk = 0;
    std::string token;
  };
  // In place of a rotation's id: the image moves.
  static constexpr RotationId kImageMoves{~uint64_t{0}};
  using MapTask = std::variant<MapGrant, GiveKv, GiveParameters, Rotate, PeerOffer, ChunkFetch>;
  // The copy is given up: for the restorer, once the engine has said that nobody copies from it.
  struct PeerReturn {
    uint64_t session_epoch = 0;
    std::optional<uint64_t> id;  // to be answered
    uint64_t copy = 0;           // peer_copy_
  };

  struct RestoreTask {
    uint64_t session_epoch = 0;
    std::optional<GrantId> grant;  // to be answered when done
    std::vector<RegionIndex> indexes;
    absl::Duration map_time;
  };

  struct PendingRevoke {
    std::vector<RegionIndex> indexes;  // of parameters
  };

  struct Instruments {
    prometheus::Histogram* fetch_parameter = nullptr;
    prometheus::Histogram* fetch_kv = nullptr;
    prometheus::Histogram* map_parameter = nullptr;
    prometheus::Histogram* map_kv = nullptr;
    prometheus::Histogram* restore = nullptr;
    prometheus::Histogram* gate_wait = nullptr;
    prometheus::Counter* restored_bytes = nullptr;
    prometheus::Counter* rotation_bytes = nullptr;
    prometheus::Gauge* peer_image_bytes = nullptr;
    prometheus::Counter* peer_filled_bytes = nullptr;
    prometheus::Counter* peer_fill_seconds = nullptr;
    prometheus::Counter* restores_held_back = nullptr;
    prometheus::Counter* blocks_held_back = nullptr;
    prometheus::Counter* checksum_failures = nullptr;
    prometheus::Counter* reconnects = nullptr;
    prometheus::Gauge* connected = nullptr;
  };

  explicit GrpcMemoryClient(Options options);

  // grpc_memory_client.cc: the first attach, and the engine's calls.
  absl::Status Start(std::shared_ptr<BrokerConnection> connection, const v1::Attached& attached);
  absl::Status ReserveRegions(const v1::Attached& attached);
  void MakeGate();
  absl::Status AwaitWorkspace(absl::Time deadline);
  void Push(MemoryEvent event) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void Wake();
  void Stop();

  // memory_client_link.cc: the link and the writer.
  void LinkLoop();
  absl::Status ReadSession();
  bool AwaitBackoff(absl::Duration backoff);
  absl::Status Reconnect();
  HeldMemory BeginSession(std::shared_ptr<BrokerConnection> connection);
  void EndSession(const absl::Status& reason);
  void SessionAttached(const v1::Attached& attached, bool reattached)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  absl::Status CheckSameMemory(const v1::Attached& attached) const;
  absl::Status Handle(v1::BrokerMessage message);
  absl::Status HandleGrant(v1::Grant grant);
  absl::Status HandleRevoke(const v1::Revoke& revoke);
  absl::Status HandleSetRotation(const v1::SetRotation& message);
  v1::WorkerMessage ReportMessage() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void HandleEndTurn(const v1::EndTurn& turn);
  void WriterLoop();
  std::optional<v1::WorkerMessage> NextMessage(absl::Time now) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void Send(v1::WorkerMessage message) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void SendActivation() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void Fatal(const absl::Status& status);
  void DropConnection(const absl::Status& reason);

  // memory_client_mapping.cc: the mapper and the restorer.
  void MapperLoop();
  void RestorerLoop();
  void Perform(MapGrant& task);
  void Perform(GiveKv& task);
  void Perform(GiveParameters& task);
  void Perform(Rotate& task);
  // The grant's slabs with their descriptors, fetched unless the back-end keeps all of the memory.
  absl::StatusOr<std::vector<SlabRegion::Arrival>> Fetch(const v1::Grant& grant);
  absl::StatusOr<std::vector<RegionIndex>> Map(const v1::Grant& grant,
                                               std::vector<SlabRegion::Arrival> slabs);
  void SendRevokeDone(RevokeId revoke, absl::Span<const SlabId> slabs, bool more);
  // Keeps granted slabs for slots, mapped nowhere.
  absl::Status KeepSpare(const v1::Grant& grant, std::vector<SlabRegion::Arrival> slabs);
  // Unmaps, answers, and maps.
  absl::Status Rearrange(RotationId id, const RotationPlan& plan);
  // Closes the gate in front of what will be unmapped, and waits for what is being written there.
  void AwaitWritten(absl::Span<const RegionIndex> places);
  void TakeOver(RotationPlan plan, bool was_available) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void Settle(RotationId id, bool changed) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  // memory_client_peer.cc: the copy of the image on another GPU.
  absl::Status HandlePeerImage(const v1::PeerImage& message);
  void LeavePeer(std::optional<uint64_t> id) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void FinishImageMove() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void Perform(PeerOffer& task);
  void Fill(PeerOffer& offer);
  void Drop(const PeerReturn& what);
  void AnswerPeer(uint64_t session_epoch, uint64_t id, uint32_t slabs)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  // memory_client_arena.cc: for the client of the block store.
  void TellArena();
  void TellArenaLost();
  absl::Status HandleUnmapChunks(const v1::UnmapChunks& message);
  void Perform(ChunkFetch& task);

  // Slabs of one message.
  size_t GiveBackPart() const;
  // Which slabs were there; none if that failed, which is logged.
  std::vector<SlabId> UnmapKv(absl::Span<const RegionIndex> indexes);
  // In one run: the copies of one task do not wait until those of the last were checked.
  void Restore(absl::Span<const RestoreTask> tasks);
  // One thread copied so much in that time.
  void Copied(Bytes bytes, absl::Duration time) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void SendMapped(uint64_t session_epoch, GrantId grant, absl::Duration map_time,
                  absl::Duration restore_time) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  const Options options_;
  HostMemory host_;
  MemoryBackend& backend_;
  Instruments instruments_;
  LinkPacer pacer_;

  // Set by Start, then constant.
  v1::ImageManifest manifest_;
  Bytes slab_bytes_;
  int32_t quota_slabs_ = 0;
  bool swaps_ = false;
  bool has_tiers_ = false;
  absl::Duration hibernate_after_;
  std::unique_ptr<SlabRegion> parameters_;
  std::unique_ptr<SlabRegion> kv_;
  std::unique_ptr<SlabRegion> workspace_;
  std::unique_ptr<ImageRestorer> restorer_;
  std::vector<ParameterSlabs::StageSpan> stages_;
  std::unique_ptr<SlotCopier> slot_copier_;  // null: the runner copies rotating layers
  std::unique_ptr<ParameterGateImpl> gate_;

  mutable Mutex mu_;
  CondVar changed_;
  bool stopping_ ABSL_GUARDED_BY(mu_) = false;
  bool detaching_ ABSL_GUARDED_BY(mu_) = false;
  bool fatal_ ABSL_GUARDED_BY(mu_) = false;

  // The session. The epoch counts attempts to attach; what belongs to an earlier one is void.
  std::shared_ptr<BrokerConnection> connection_ ABSL_GUARDED_BY(mu_);
  uint64_t session_epoch_ ABSL_GUARDED_BY(mu_) = 0;
  bool connected_ ABSL_GUARDED_BY(mu_) = false;
  bool writing_ ABSL_GUARDED_BY(mu_) = false;
  SessionId session_ ABSL_GUARDED_BY(mu_);
  std::string block_token_ ABSL_GUARDED_BY(mu_);
  ArenaListener* arena_listener_ ABSL_GUARDED_BY(mu_) = nullptr;
  absl::flat_hash_map<RevokeId, PendingRevoke> revokes_ ABSL_GUARDED_BY(mu_);
  std::optional<Rotate> wanted_rotation_ ABSL_GUARDED_BY(mu_);  // the engine finishes it
  std::optional<TurnId> ending_turn_ ABSL_GUARDED_BY(mu_);
  std::deque<v1::WorkerMessage> outgoing_ ABSL_GUARDED_BY(mu_);

  // What the engine wants.
  std::optional<ActivationReason> activation_ ABSL_GUARDED_BY(mu_);
  std::optional<v1::SetKvTarget> kv_target_ ABSL_GUARDED_BY(mu_);
  bool kv_target_sent_ ABSL_GUARDED_BY(mu_) = false;
  std::optional<WorkerLoad> load_ ABSL_GUARDED_BY(mu_);
  bool load_sent_ ABSL_GUARDED_BY(mu_) = false;
  Bytes context_bytes_ ABSL_GUARDED_BY(mu_);
  absl::Time load_time_ ABSL_GUARDED_BY(mu_) = absl::InfinitePast();
  // As the broker says; in host memory it is measured here.
  double image_bytes_per_second_ ABSL_GUARDED_BY(mu_) = 0;
  double host_bytes_per_second_ ABSL_GUARDED_BY(mu_) = 0;  // the same without a copy
  bool image_on_peer_ ABSL_GUARDED_BY(mu_) = false;        // the copy is whole, and its rate counts
  Bytes rotation_bytes_ ABSL_GUARDED_BY(mu_);              // copied here

  // What the engine is told.
  std::vector<MemoryEvent> events_ ABSL_GUARDED_BY(mu_);
  std::function<void()> wake_ ABSL_GUARDED_BY(mu_);

  // The mapper's and the restorer's work.
  std::deque<MapTask> map_tasks_ ABSL_GUARDED_BY(mu_);
  bool mapping_ ABSL_GUARDED_BY(mu_) = false;
  std::deque<RestoreTask> restore_tasks_ ABSL_GUARDED_BY(mu_);
  bool restoring_ ABSL_GUARDED_BY(mu_) = false;
  std::deque<std::variant<PeerOffer, PeerReturn>> peer_tasks_ ABSL_GUARDED_BY(mu_);
  // Whether memory of another GPU is offered, or mapped; counts such offers.
  bool peer_kept_ ABSL_GUARDED_BY(mu_) = false;
  uint64_t peer_copy_ ABSL_GUARDED_BY(mu_) = 0;
  std::optional<PeerReturn> peer_leaving_ ABSL_GUARDED_BY(mu_);  // the engine finishes it
  std::optional<ParameterSlabs> slabs_ ABSL_GUARDED_BY(mu_);
  // ParameterTable; written by the mapper alone.
  std::map<RegionIndex, SlabRegion::Held> slots_ ABSL_GUARDED_BY(mu_);
  Rotation rotation_ ABSL_GUARDED_BY(mu_);
  int32_t settling_ ABSL_GUARDED_BY(mu_) = 0;  // rotations that the engine waits for

  std::minstd_rand jitter_;  // of the link
  std::thread link_, writer_, mapper_, restore_thread_;
};

}  // namespace palimpsest

#endif  // PALIMPSEST_WORKER_MEMORY_GRPC_MEMORY_CLIENT_H_
