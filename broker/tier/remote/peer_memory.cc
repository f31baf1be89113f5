#include "broker/tier/remote/peer_memory.h"

#include <sys/mman.h>

#include <atomic>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "absl/strings/str_cat.h"
#include "broker/tier/aligned_buffer.h"
#include "broker/tier/extent_allocator.h"
#include "broker/tier/remote/remote_wire.h"
#include "broker/tier/remote/ucx_node.h"
#include "common/block_checksum.h"
#include "common/fd.h"
#include "common/monotonic_time.h"
#include "common/mutex.h"

namespace palimpsest {
namespace {

// Of messages to one peer that it has not taken.
constexpr size_t kMaxUnderWay = 1024;
constexpr absl::Duration kLongestNap = absl::Seconds(1);

// Private memory that is there from the start, and no descriptor's.
class Region {
 public:
  static absl::StatusOr<Region> Make(Bytes size) {
    void* const data = ::mmap(nullptr, size.count(), PROT_READ | PROT_WRITE,
                              MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);
    if (data == MAP_FAILED) {
      return absl::ResourceExhaustedError(absl::StrCat(
          "no ", size.ToString(), " of memory for peers: ", ErrnoStatus("").message()));
    }
    return Region({static_cast<std::byte*>(data), static_cast<size_t>(size.count())});
  }
  Region(Region&& other) noexcept : bytes_(std::exchange(other.bytes_, {})) {}
  ~Region() {
    if (!bytes_.empty()) ::munmap(bytes_.data(), bytes_.size());
  }

  absl::Span<std::byte> bytes() const { return bytes_; }

 private:
  explicit Region(absl::Span<std::byte> bytes) : bytes_(bytes) {}
  absl::Span<std::byte> bytes_;
};

}  // namespace

class PeerMemory::Core : public UcxNode::Handler {
 public:
  using Link = UcxNode::Link;
  using Kind = RemoteRequest::Kind;

  Core(const Options& options, Region region)
      : options_(options),
        region_(std::move(region)),
        extents_(region_.bytes().size() / kIoUnit.count()) {}
  ~Core() override;

  absl::Status Start();
  const std::string& address() const { return address_; }
  Usage usage() const {
    MutexLock lock(&mutex_);
    return usage_;
  }

  bool OnAccepted(Link* link) override;
  void OnMessage(Link* link, absl::string_view header, const UcxNode::Payload& payload) override;
  void OnClosed(Link* link, const absl::Status& why) override;

 private:
  struct Block {
    Link* owner = nullptr;  // null once dropped
    Extent extent;
    BlockKey key;
    Bytes length;
    uint64_t checksum = 0;
    std::string tenant;
    bool arriving = true;
    int loading = 0;
  };
  // Of transfers, by a number that grows.
  using Deadlines = std::map<uint64_t, absl::Time>;
  struct Peer {
    std::set<uint64_t> places;
    Deadlines arriving;
    Deadlines loading;
    bool cut_off = false;
  };
  using Blocks = absl::flat_hash_map<uint64_t, Block>;

  void Run();
  void CutOff(Link* link, absl::string_view why);
  // With the bytes of a block, if it is a load's.
  void Reply(
      Link* link, const RemoteReply& reply, absl::Span<const std::byte> bytes = {},
      UcxNode::Done done = [](const absl::Status&) {});
  void Refuse(Link* link, const RemoteRequest& request, const absl::Status& why);
  // The peer's own block, if it is there.
  Block* FindBlock(Link* link, const RemoteRequest& request);
  void TakeBlock(Link* link, const RemoteRequest& request, const UcxNode::Payload& payload);
  void Arrived(Link* link, uint64_t place, uint64_t request, const absl::Status& status);
  void LendBlock(Link* link, const RemoteRequest& request);
  void Lent(Link* link, uint64_t place, uint64_t load);
  void DropTenant(Link* link, const std::string& tenant);
  void Drop(uint64_t place);
  void FreeIfUnused(Blocks::iterator block);
  void CutOffLate(absl::Time now);
  void Publish();

  absl::Span<std::byte> MemoryOf(const Block& block) const {
    return region_.bytes().subspan(block.extent.first * kIoUnit.count(), block.length.count());
  }

  const Options options_;
  const Region region_;
  std::string address_;
  std::unique_ptr<UcxNode> node_;
  std::thread thread_;
  std::atomic<bool> stopping_ = false;

  // Of the thread alone.
  ExtentAllocator extents_;
  uint64_t last_place_ = 0;
  uint64_t last_load_ = 0;
  Blocks blocks_;
  absl::flat_hash_map<Link*, Peer> peers_;
  uint64_t ready_ = 0;
  uint64_t loading_ = 0;
  uint64_t loaded_ = 0;
  uint64_t refused_ = 0;
  uint64_t cut_off_ = 0;

  mutable Mutex mutex_;
  Usage usage_ ABSL_GUARDED_BY(mutex_);
};

absl::Status PeerMemory::Core::Start() {
  absl::StatusOr<std::unique_ptr<UcxNode>> node = UcxNode::Make(options_.transports, this);
  if (!node.ok()) return node.status();
  node_ = *std::move(node);
  absl::StatusOr<std::string> address = node_->Listen(options_.listen);
  if (!address.ok()) return address.status();
  address_ = *std::move(address);
  thread_ = std::thread([this] { Run(); });
  return absl::OkStatus();
}

PeerMemory::Core::~Core() {
  stopping_ = true;
  if (thread_.joinable()) {
    node_->Wake();
    thread_.join();
  }
  node_.reset();  // before the memory that it reads and writes
}

void PeerMemory::Core::Run() {
  while (!stopping_) {
    node_->RunOnce(MonotonicNow() + kLongestNap);
    CutOffLate(MonotonicNow());
    Publish();
  }
}

void PeerMemory::Core::Publish() {
  MutexLock lock(&mutex_);
  usage_ = {.peers = peers_.size(),
            .blocks = ready_,
            .loading = loading_,
            .loaded = loaded_,
            .used = kIoUnit * static_cast<int64_t>(extents_.units() - extents_.free_units()),
            .refused = refused_,
            .cut_off = cut_off_};
}

bool PeerMemory::Core::OnAccepted(Link* link) {
  if (peers_.size() >= options_.max_peers) return false;
  peers_[link];
  return true;
}

void PeerMemory::Core::CutOff(Link* link, absl::string_view why) {
  if (std::exchange(peers_[link].cut_off, true)) return;
  ++cut_off_;
  node_->Close(link, absl::AbortedError(why));
}

void PeerMemory::Core::CutOffLate(absl::Time now) {
  for (const auto& [link, peer] : peers_) {
    for (const Deadlines* deadlines : {&peer.arriving, &peer.loading}) {
      if (deadlines->empty() || deadlines->begin()->second > now) continue;
      CutOff(link, "a peer took too long for a block");
    }
  }
}

void PeerMemory::Core::OnClosed(Link* link, const absl::Status&) {
  const auto peer = peers_.find(link);
  if (peer == peers_.end()) return;
  const auto places = std::move(peer->second.places);
  for (uint64_t place : places) Drop(place);
  peers_.erase(link);
}

void PeerMemory::Core::Reply(Link* link, const RemoteReply& reply,
                             absl::Span<const std::byte> bytes, UcxNode::Done done) {
  if (UcxNode::UnderWay(link) > kMaxUnderWay) CutOff(link, "a peer does not take its replies");
  node_->Send(link, EncodeReply(reply), bytes, std::move(done));
}

void PeerMemory::Core::Refuse(Link* link, const RemoteRequest& request, const absl::Status& why) {
  ++refused_;
  Reply(link, {.id = request.id, .code = why.code(), .text = std::string(why.message())});
}

void PeerMemory::Core::OnMessage(Link* link, absl::string_view header,
                                 const UcxNode::Payload& payload) {
  if (!peers_.contains(link)) return;
  const absl::StatusOr<RemoteRequest> request = DecodeRequest(header);
  if (!request.ok()) return CutOff(link, request.status().message());
  switch (request->kind) {
    case Kind::kStore:
      TakeBlock(link, *request, payload);
      break;
    case Kind::kLoad:
      LendBlock(link, *request);
      break;
    case Kind::kRemove:
      if (FindBlock(link, *request) == nullptr) {
        Reply(link, {.id = request->id, .code = absl::StatusCode::kNotFound});
      } else {
        Drop(request->place);
        Reply(link, {.id = request->id});
      }
      break;
    case Kind::kPurge:
      DropTenant(link, request->tenant);
      Reply(link, {.id = request->id});
      break;
  }
}

PeerMemory::Core::Block* PeerMemory::Core::FindBlock(Link* link, const RemoteRequest& request) {
  const auto found = blocks_.find(request.place);
  if (found == blocks_.end() || found->second.owner != link || found->second.arriving ||
      found->second.key != request.key) {
    return nullptr;
  }
  return &found->second;
}

void PeerMemory::Core::TakeBlock(Link* link, const RemoteRequest& request,
                                 const UcxNode::Payload& payload) {
  if (request.length < Bytes(1) || payload.size != request.length.count() ||
      request.tenant.empty()) {
    return Refuse(link, request,
                  absl::InvalidArgumentError(absl::StrCat(
                      "a block of ", request.length.count(), " bytes came with ", payload.size,
                      ", of a tenant's name of ", request.tenant.size())));
  }
  const uint64_t units = CeilDiv(request.length, kIoUnit);
  const std::optional<Extent> extent =
      units <= extents_.units() ? extents_.Allocate(units) : std::nullopt;
  if (!extent) {
    return Refuse(
        link, request,
        absl::ResourceExhaustedError(absl::StrCat(
            "no room for ", request.length.ToString(), " in one piece: ",
            (kIoUnit * static_cast<int64_t>(extents_.free_units())).ToString(), " are free")));
  }
  const uint64_t place = ++last_place_;
  const Block& block = blocks_
                           .emplace(place, Block{.owner = link,
                                                 .extent = *extent,
                                                 .key = request.key,
                                                 .length = request.length,
                                                 .checksum = request.checksum,
                                                 .tenant = request.tenant})
                           .first->second;
  Peer& peer = peers_[link];
  peer.places.insert(place);
  peer.arriving[place] = MonotonicNow() + options_.patience;
  node_->Receive(link, payload, MemoryOf(block),
                 [this, link, place, id = request.id](const absl::Status& status) {
                   Arrived(link, place, id, status);
                 });
}

void PeerMemory::Core::Arrived(Link* link, uint64_t place, uint64_t request,
                               const absl::Status& status) {
  const auto found = blocks_.find(place);
  Block& block = found->second;
  block.arriving = false;
  peers_[link].arriving.erase(place);
  const bool whole = status.ok() && BlockChecksum(block.key, MemoryOf(block)) == block.checksum;
  if (whole && block.owner != nullptr) {
    ++ready_;
    Reply(link, {.id = request, .place = place});
    return;
  }
  if (block.owner != nullptr) {
    peers_[link].places.erase(place);
    block.owner = nullptr;
  }
  FreeIfUnused(found);
  if (status.ok()) {
    Refuse(link, {.id = request},
           whole ? absl::NotFoundError("the block was removed before it had come")
                 : absl::DataLossError("the block that came has another checksum"));
  }
}

void PeerMemory::Core::LendBlock(Link* link, const RemoteRequest& request) {
  Block* const block = FindBlock(link, request);
  if (block == nullptr || block->length != request.length) {
    return Refuse(link, request, absl::NotFoundError("no such block"));
  }
  Peer& peer = peers_[link];
  if (peer.loading.size() >= options_.max_loads_per_peer) {
    return Refuse(link, request,
                  absl::InvalidArgumentError(absl::StrCat("more than ", options_.max_loads_per_peer,
                                                          " blocks are loaded at once")));
  }
  const uint64_t load = ++last_load_;
  peer.loading[load] = MonotonicNow() + options_.patience;
  ++block->loading;
  ++loading_;
  Reply(link, {.id = request.id, .length = block->length, .checksum = block->checksum},
        MemoryOf(*block), [this, link, place = request.place, load](const absl::Status&) {
          Lent(link, place, load);
        });
}

void PeerMemory::Core::Lent(Link* link, uint64_t place, uint64_t load) {
  peers_[link].loading.erase(load);
  --loading_;
  ++loaded_;
  const auto block = blocks_.find(place);
  --block->second.loading;
  FreeIfUnused(block);
}

void PeerMemory::Core::DropTenant(Link* link, const std::string& tenant) {
  std::vector<uint64_t> dropped;
  for (uint64_t place : peers_[link].places) {
    if (blocks_.at(place).tenant == tenant) dropped.push_back(place);
  }
  for (uint64_t place : dropped) Drop(place);
}

void PeerMemory::Core::Drop(uint64_t place) {
  const auto found = blocks_.find(place);
  Block& block = found->second;
  peers_[block.owner].places.erase(place);
  block.owner = nullptr;
  if (!block.arriving) --ready_;
  FreeIfUnused(found);
}

void PeerMemory::Core::FreeIfUnused(Blocks::iterator block) {
  if (block->second.owner != nullptr || block->second.arriving || block->second.loading > 0) return;
  extents_.Free(block->second.extent);
  blocks_.erase(block);
}

PeerMemory::PeerMemory(std::unique_ptr<Core> core) : core_(std::move(core)) {}
PeerMemory::~PeerMemory() = default;

absl::StatusOr<std::unique_ptr<PeerMemory>> PeerMemory::Start(const Options& options) {
  if (options.bytes < kIoUnit || options.bytes.count() % kIoUnit.count() != 0 ||
      options.max_peers < 1 || options.max_loads_per_peer < 1 ||
      options.patience <= absl::ZeroDuration()) {
    return absl::InvalidArgumentError(absl::StrCat(
        "memory for peers of ", options.bytes.count(), " bytes; expected whole units ", "of ",
        kIoUnit.count(), ", at least one peer and load, and a patience above 0"));
  }
  absl::StatusOr<Region> region = Region::Make(options.bytes);
  if (!region.ok()) return region.status();
  auto core = std::make_unique<Core>(options, *std::move(region));
  if (absl::Status status = core->Start(); !status.ok()) return status;
  return std::unique_ptr<PeerMemory>(new PeerMemory(std::move(core)));
}

const std::string& PeerMemory::address() const { return core_->address(); }
PeerMemory::Usage PeerMemory::usage() const { return core_->usage(); }

}  // namespace palimpsest
