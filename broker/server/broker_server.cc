#include "broker/server/broker_server.h"

#include <grpc/grpc.h>
#include <grpcpp/ext/proto_server_reflection_plugin.h>
#include <grpcpp/grpcpp.h>
#include <grpcpp/health_check_service_interface.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <map>
#include <mutex>
#include <set>
#include <utility>

#include "absl/strings/str_cat.h"
#include "broker/device/host_slab_device.h"
#include "broker/device/memory_limit.h"
#include "broker/server/host_checks.h"
#include "common/file.h"
#include "common/file_lock.h"
#include "common/grpc_keepalive.h"
#include "common/grpc_time.h"
#include "common/log.h"
#include "common/stored_block.h"
#include "worker/model/manifest.h"

namespace palimpsest {
namespace {

constexpr size_t kMaxOffers = 4096;
constexpr int kMaxServerThreads = 512;
constexpr int kMaxOperatorThreads = 16;
// Of a call to the block store.
constexpr int kBlockMessageBytes = 4 << 20;
// Workers of a broker that died let go of what they kept when they notice.
constexpr absl::Duration kGpuMemoryPatience = absl::Seconds(10);
constexpr absl::Duration kMetricsPeriod = absl::Seconds(1);
constexpr absl::Duration kShutdownPatience = absl::Seconds(2);
// How often the clock is looked at, and from what gap on the broker was not running.
constexpr absl::Duration kBeat = absl::Milliseconds(100);
constexpr absl::Duration kLongestGap = absl::Seconds(1);
// Who may connect: the owner and its group; a tenant's own socket belongs to the tenant.
constexpr mode_t kSharedSocketMode = 0660;
constexpr mode_t kTenantSocketMode = 0600;

absl::Status Secure(const std::string& path, std::optional<uid_t> owner) {
  if (chmod(path.c_str(), owner.has_value() ? kTenantSocketMode : kSharedSocketMode) != 0) {
    return ErrnoStatus(absl::StrCat("chmod ", path));
  }
  if (owner.has_value() && *owner != geteuid() &&
      chown(path.c_str(), *owner, static_cast<gid_t>(-1)) != 0) {
    return ErrnoStatus(absl::StrCat("give ", path, " to uid ", *owner));
  }
  return absl::OkStatus();
}

// Workers compute where their slabs are.
WeightFormat FormatOf(const BrokerConfig& config) {
  return config.backend == BrokerConfig::Backend::kCuda ? WeightFormat::kRowMajor
                                                        : WeightFormat::kCpuPanels;
}

// Every model of a pool runs on all of its GPUs.
int32_t RanksOf(const BrokerConfig& config) {
  return config.backend == BrokerConfig::Backend::kCuda ? static_cast<int32_t>(config.gpus.size())
                                                        : 1;
}

std::set<std::string> ImagesOfLiveSessions(const JournalState& state) {
  std::set<std::string> fingerprints;
  for (const auto& [id, session] : state.sessions) {
    if (ProcessHandle::Open(ProcessIdentity{session.pid(), session.process_start()}).ok()) {
      fingerprints.insert(session.fingerprint());
    }
  }
  return fingerprints;
}

}  // namespace

absl::StatusOr<PoolPlan> PlanPool(const BrokerConfig& config) {
  PoolPlan plan;
  std::vector<TenantDemand> demands;
  // By folder and seed, which tell images apart here.
  std::map<std::pair<std::string, std::optional<uint64_t>>, Bytes> images;
  for (const BrokerTenant& tenant : config.tenants) {
    const auto manifest =
        PlanImage(tenant.model, config.slab_bytes, FormatOf(config), RanksOf(config));
    if (!manifest.ok()) {
      return absl::Status(manifest.status().code(),
                          absl::StrCat("tenant ", tenant.name, ": ", manifest.status().message()));
    }
    const Bytes image(static_cast<int64_t>(manifest->image_bytes()));
    const Bytes block(static_cast<int64_t>(manifest->kv_block_bytes()));
    // One block more than the tokens fill: the null block.
    const int64_t blocks =
        CeilDiv(Bytes(tenant.model.max_sequence_tokens), Bytes(tenant.model.kv_block_tokens)) + 1;
    TenantDemand demand;
    demand.config.name = tenant.name;
    demand.config.priority = tenant.priority;
    demand.config.pinned = tenant.pin;
    demand.config.floor_slabs =
        static_cast<uint32_t>(CeilDiv(tenant.floor.value_or(Bytes(0)), config.slab_bytes));
    demand.floor_unsaid = !tenant.floor.has_value();
    // What contexts of others take is no room for anybody.
    demand.config.quota_slabs =
        std::min(config.policy.pool_slabs,
                 static_cast<uint32_t>(std::max(tenant.quota - tenant.context, Bytes(0)) /
                                       config.slab_bytes));
    demand.config.workspace_slabs =
        static_cast<uint32_t>(CeilDiv(tenant.workspace, config.slab_bytes));
    demand.config.sequence_slabs =
        static_cast<uint32_t>(CeilDiv(block * blocks, config.slab_bytes));
    demand.image_slabs = static_cast<uint32_t>(image / config.slab_bytes);
    plan.image_slabs.push_back(demand.image_slabs);
    plan.context_allowance.push_back(tenant.context);
    plan.hibernate_after.push_back(tenant.hibernate_after);
    const bool gpu = config.backend == BrokerConfig::Backend::kCuda;
    plan.block_bytes.push_back((gpu ? StoredPartBytes(block) : block) * RanksOf(config));
    images[{tenant.model.folder, tenant.model.dummy_seed}] = WholeImageBytes(*manifest);
    demands.push_back(std::move(demand));
  }
  for (const auto& [source, bytes] : images) plan.image_bytes += bytes;
  // Turns bound how long anybody waits, and their holder is to have all that the others leave.
  if (config.memory_policy == MemoryPolicy::kRemap && config.policy.sharing == Sharing::kSpatial) {
    demands = WithDefaultFloors(config.policy.pool_slabs, std::move(demands));
  }
  for (const TenantDemand& demand : demands) {
    plan.tenants.push_back(ConfigUnder(config.memory_policy, demand));
  }
  if (absl::Status status = ValidatePool(config.policy.pool_slabs, demands, config.memory_policy);
      !status.ok()) {
    return status;
  }
  return plan;
}

absl::StatusOr<std::unique_ptr<BrokerServer>> BrokerServer::Start(
    const BrokerConfig& config, std::function<void(const absl::Status&)> fatal,
    const CudaPoolFactory& cuda, BlockSeams seams) {
  const absl::StatusOr<PoolPlan> plan = PlanPool(config);
  if (!plan.ok()) return plan.status();
  // Never undone: the library's own end, after the last server, may wait ten seconds for a poll of
  // its own.
  static std::once_flag grpc_once;
  std::call_once(grpc_once, grpc_init);
  std::unique_ptr<BrokerServer> server(new BrokerServer(config));
  absl::Status status;
  status = server->OpenState(*plan, std::move(fatal), cuda, std::move(seams));
  if (!status.ok()) return status;
  if (status = server->StartDescriptors(); !status.ok()) return status;
  if (status = server->StartControl(); !status.ok()) return status;
  if (status = server->StartOperator(); !status.ok()) return status;
  if (status = server->StartMetrics(); !status.ok()) return status;
  if (config.pack_at_start) {
    for (uint32_t i = 0; i < config.tenants.size(); ++i) server->images_->Prepare(TenantId(i));
  }
  return server;
}

BrokerServer::BrokerServer(const BrokerConfig& config)
    : config_(config),
      metrics_(MetricProcess::kBroker),
      broker_metrics_(metrics_),
      clock_(Clock::Real(), kLongestGap),
      hand_overs_(clock_, kMaxOffers),
      beat_([this] { Beat(); }) {
  if (!config_.control_socket.empty()) {
    sockets_.push_back(
        SocketPair{config_.control_socket, config_.descriptor_socket, std::nullopt, std::nullopt});
  }
  for (uint32_t i = 0; i < config_.tenants.size(); ++i) {
    const BrokerTenant& tenant = config_.tenants[i];
    if (tenant.socket_dir.empty()) continue;
    sockets_.push_back(SocketPair{tenant.socket_dir + "/broker.sock",
                                  tenant.socket_dir + "/descriptors.sock", TenantId(i),
                                  tenant.uid.value_or(geteuid())});
  }
}

Bytes BrokerServer::MissingMemory(const PoolPlan& plan, const std::set<std::string>& expected,
                                  bool ordinary_pages) const {
  const JournalState& recovered = journal_->recovered();
  Bytes missing = plan.image_bytes;
  for (const std::string& fingerprint : expected) {
    const auto image = recovered.images.find(fingerprint);
    v1::ImageManifest manifest;
    if (image != recovered.images.end() && manifest.ParseFromString(image->second.manifest())) {
      missing -= std::min(missing, WholeImageBytes(manifest));
    }
  }
  const int64_t held = static_cast<int64_t>(recovered.slabs.size());
  const int64_t fresh = std::max<int64_t>(config_.policy.pool_slabs - held, 0);
  return ordinary_pages ? missing + config_.slab_bytes * fresh : missing;
}

uint32_t BrokerServer::PeerSlabs() const {
  return config_.peer.has_value() ? static_cast<uint32_t>(config_.peer->bytes / config_.slab_bytes)
                                  : 0;
}

absl::Status BrokerServer::CheckPeer() {
  if (!config_.peer.has_value()) return absl::OkStatus();
  const absl::Status status = device_->CreateBeside(config_.peer->gpu).status();
  if (status.ok() || absl::IsResourceExhausted(status)) return absl::OkStatus();
  return absl::FailedPreconditionError(absl::StrCat(
      "pool.peer.gpu: no memory of GPU ", config_.peer->gpu, " can be had: ", status.message()));
}

absl::StatusOr<bool> BrokerServer::OpenDevice(const CudaPoolFactory& cuda) {
  if (config_.backend == BrokerConfig::Backend::kCuda) {
    auto device = cuda(CudaPool{.gpus = config_.gpus,
                                .slabs = config_.policy.pool_slabs,
                                .slab_bytes = config_.slab_bytes,
                                .generation = journal_->generation(),
                                .beside = PeerSlabs()});
    if (!device.ok()) return device.status();
    device_ = *std::move(device);
    if (absl::Status status = CheckPeer(); !status.ok()) return status;
    const std::vector<SlabDevice::Link> links = device_->Links();
    for (size_t i = 0; i < links.size(); ++i) {
      broker_metrics_.LinkMeasured(config_.gpus[i], links[i]);
    }
    return false;
  }
  absl::StatusOr<std::unique_ptr<HostSlabDevice>> device =
      HostSlabDevice::Open({.slabs = config_.policy.pool_slabs, .slab_bytes = config_.slab_bytes});
  if (!device.ok()) return device.status();
  const bool ordinary_pages = (*device)->best_pages() != HostSlabDevice::Pages::kHugetlb;
  device_ = *std::move(device);
  return ordinary_pages;
}

absl::Status BrokerServer::OpenState(const PoolPlan& plan,
                                     std::function<void(const absl::Status&)> fatal,
                                     const CudaPoolFactory& cuda, BlockSeams seams) {
  absl::StatusOr<std::string> boot_id = BootId();
  if (!boot_id.ok()) return boot_id.status();
  absl::StatusOr<std::unique_ptr<Journal>> journal =
      Journal::Open(Journal::Options{.directory = config_.state_dir,
                                     .boot_id = *std::move(boot_id),
                                     .slab_bytes = config_.slab_bytes,
                                     .pool_slabs = config_.policy.pool_slabs});
  if (!journal.ok()) return journal.status();
  journal_ = *std::move(journal);
  const absl::StatusOr<bool> ordinary_pages = OpenDevice(cuda);
  if (!ordinary_pages.ok()) return ordinary_pages.status();
  const std::set<std::string> expected = ImagesOfLiveSessions(journal_->recovered());
  const Bytes arena = config_.tiers.has_value() ? config_.tiers->dram.bytes : Bytes(0);
  absl::Status status = CheckMemoryLimit(MissingMemory(plan, expected, *ordinary_pages) + arena);
  if (status.ok()) status = OpenBlocks(plan, std::move(seams));
  if (!status.ok()) return status;
  // Half: who returned, but without the image, must get it before its own grace has passed.
  ImageManager::Options images{.slab_bytes = config_.slab_bytes,
                               .packer = config_.packer,
                               .pack_deadline = config_.pack_deadline,
                               .expected = expected,
                               .adoption_grace = config_.policy.reattach_grace / 2};
  images.format = FormatOf(config_);
  images.ranks = RanksOf(config_);
  for (const BrokerTenant& tenant : config_.tenants) images.models.push_back(tenant.model);
  images_ = std::make_unique<ImageManager>(std::move(images), *journal_, broker_metrics_);
  Broker::Options options{.arbiter = config_.policy,
                          .slab_bytes = config_.slab_bytes,
                          .memory_policy = config_.memory_policy,
                          .tenants = plan.tenants,
                          .image_slabs = plan.image_slabs,
                          .context_allowance = plan.context_allowance,
                          .hibernate_after = plan.hibernate_after,
                          .token_lifetime = config_.token_lifetime};
  if (config_.peer.has_value()) {
    options.peer_slabs = PeerSlabs();
    options.peer_gpu = config_.peer->gpu;
    for (const BrokerTenant& tenant : config_.tenants) {
      options.peer_images.push_back(tenant.peer_image);
    }
  }
  if (config_.trusted_workers) options.cleaning = Broker::Options::Cleaning::kScrub;
  if (config_.backend == BrokerConfig::Backend::kCuda) {
    options.cleaner_threads = 1;
    options.memory_patience = kGpuMemoryPatience;
  }
  absl::StatusOr<std::unique_ptr<Broker>> broker = Broker::Create(
      std::move(options), Broker::Parts{clock_, *journal_, *device_, *images_, hand_overs_,
                                        broker_metrics_, std::move(fatal), blocks_.get()});
  if (!broker.ok()) return broker.status();
  broker_ = *std::move(broker);
  return broker_->Start();
}

absl::Status BrokerServer::OpenBlocks(const PoolPlan& plan, BlockSeams seams) {
  if (!config_.tiers.has_value()) return absl::OkStatus();
  BlockStore::Options options;
  options.tiers = *config_.tiers;
  options.token_lifetime = config_.token_lifetime;
  options.chunk_maker = std::move(seams.chunk_maker);
  options.tier_wrapper = std::move(seams.tier_wrapper);
  for (size_t i = 0; i < config_.tenants.size(); ++i) {
    options.tenants.push_back(
        {config_.tenants[i].name, config_.block_budgets[i], plan.block_bytes[i]});
  }
  absl::StatusOr<std::unique_ptr<BlockStore>> blocks =
      BlockStore::Open(std::move(options), clock_, hand_overs_);
  if (!blocks.ok()) return blocks.status();
  blocks_ = *std::move(blocks);
  return absl::OkStatus();
}

absl::Status BrokerServer::StartDescriptors() {
  DescriptorServer::Options options;
  for (const SocketPair& pair : sockets_) {
    options.sockets.push_back(DescriptorServer::Socket{
        pair.descriptors, pair.only, pair.owner ? kTenantSocketMode : kSharedSocketMode});
  }
  for (uint32_t i = 0; i < config_.tenants.size(); ++i) {
    const BrokerTenant& tenant = config_.tenants[i];
    TenantCredentials credentials{TenantId(i), tenant.name, tenant.uid, ""};
    if (!tenant.secret_file.empty()) {
      absl::StatusOr<std::string> secret = ReadSecretFile(tenant.secret_file);
      if (!secret.ok()) return secret.status();
      if (secret->size() > kMaxSecretBytes) {
        return absl::InvalidArgumentError(absl::StrCat(tenant.secret_file, " has ", secret->size(),
                                                       " bytes, expected at most ",
                                                       kMaxSecretBytes));
      }
      credentials.secret = *std::move(secret);
    }
    options.tenants.push_back(std::move(credentials));
  }
  auto descriptors = DescriptorServer::Start(std::move(options), clock_, hand_overs_, *broker_);
  if (!descriptors.ok()) return descriptors.status();
  descriptors_ = *std::move(descriptors);
  for (const SocketPair& pair : sockets_) {
    if (absl::Status status = Secure(pair.descriptors, pair.owner); !status.ok()) return status;
  }
  return absl::OkStatus();
}

absl::Status BrokerServer::StartControl() {
  std::vector<std::string> controls;
  for (const SocketPair& pair : sockets_) controls.push_back(pair.control);
  if (const absl::Status locks = MakeStartLocks(controls); !locks.ok()) {
    Log(LogLevel::kWarning, "workers may start beside each other, and measure what others take",
        {{"status", locks}});
  }
  service_ = std::make_unique<SessionService>(
      SessionService::Options{},
      SessionService::Parts{*broker_, *descriptors_, *images_, broker_metrics_});
  grpc::EnableDefaultHealthCheckService(true);
  grpc::reflection::InitProtoReflectionServerBuilderPlugin();
  grpc::ServerBuilder builder;
  grpc::ResourceQuota quota("palimpsest-broker");
  quota.SetMaxThreads(kMaxServerThreads);
  builder.SetResourceQuota(quota);
  PermitKeepalive(builder);
  builder.SetMaxReceiveMessageSize(
      std::max(kBlockMessageBytes, (1 << 20) + 64 * static_cast<int>(config_.policy.pool_slabs)));
  std::vector<int> bound(sockets_.size(), 0);
  for (size_t i = 0; i < sockets_.size(); ++i) {
    if (absl::Status status = ClearSocketPath(sockets_[i].control); !status.ok()) return status;
    builder.AddListeningPort("unix:" + sockets_[i].control, grpc::InsecureServerCredentials(),
                             &bound[i]);
  }
  builder.RegisterService(service_.get());
  block_service_ = std::make_unique<BlockService>(blocks_.get());
  builder.RegisterService(block_service_.get());
  server_ = builder.BuildAndStart();
  for (size_t i = 0; i < sockets_.size(); ++i) {
    if (server_ == nullptr || bound[i] == 0) {
      return absl::FailedPreconditionError(
          absl::StrCat("cannot listen on ", sockets_[i].control,
                       ": does its folder exist, and may we write it?"));
    }
    const absl::Status status = Secure(sockets_[i].control, sockets_[i].owner);
    if (!status.ok()) return status;
  }
  return absl::OkStatus();
}

absl::Status BrokerServer::StartOperator() {
  if (blocks_ == nullptr) return absl::OkStatus();
  const std::string path = config_.state_dir + "/operator.sock";
  if (absl::Status status = ClearSocketPath(path); !status.ok()) return status;
  operator_service_ = std::make_unique<BlockAdminService>(blocks_.get());
  grpc::ServerBuilder builder;
  grpc::ResourceQuota quota("palimpsest-operator");
  quota.SetMaxThreads(kMaxOperatorThreads);
  builder.SetResourceQuota(quota);
  int bound = 0;
  builder.AddListeningPort("unix:" + path, grpc::InsecureServerCredentials(), &bound);
  builder.RegisterService(operator_service_.get());
  operator_server_ = builder.BuildAndStart();
  if (operator_server_ == nullptr || bound == 0) {
    return absl::FailedPreconditionError(
        absl::StrCat("cannot listen on ", path, ": is its path longer than 107 bytes?"));
  }
  return Secure(path, geteuid());
}

absl::Status BrokerServer::StartMetrics() {
  if (!config_.metrics_listen.empty()) {
    auto server = MetricsServer::Start(metrics_, config_.metrics_listen);
    if (!server.ok()) return server.status();
    metrics_server_ = *std::move(server);
  }
  RefreshMetrics();
  refresher_ = std::thread([this] {
    while (!stopping_.WaitForNotificationWithTimeout(kMetricsPeriod)) RefreshMetrics();
  });
  return absl::OkStatus();
}

void BrokerServer::Beat() {
  absl::Duration stopped;
  do {
    (void)clock_.Now();
    const absl::Duration before = std::exchange(stopped, clock_.stopped());
    if (stopped > before) {
      Log(LogLevel::kWarning, "the broker stood still; no deadline counts this time",
          {{"seconds", stopped - before}});
    }
  } while (!stopping_.WaitForNotificationWithTimeout(kBeat));
}

void BrokerServer::RefreshMetrics() {
  broker_metrics_.Refresh(broker_->Status(), descriptors_->stats(), broker_->sessions());
  if (blocks_ != nullptr) {
    for (const BlockStore::Foreign& foreign : blocks_->ForeignBlocks()) {
      broker_metrics_.ForeignBlocks(foreign.tenant, foreign.tier, foreign.blocks);
    }
    const std::vector<Bytes> retained = blocks_->RetainedBytes();
    for (size_t i = 0; i < retained.size(); ++i) {
      broker_metrics_.RetainedBytes(config_.tenants[i].name, retained[i]);
    }
  }
  v1::GetRemapLogRequest totals;
  totals.set_limit(1);
  broker_metrics_.RefreshRemaps(broker_->RemapDecisions(totals));
}

std::string BrokerServer::metrics_address() const {
  return metrics_server_ == nullptr ? "" : metrics_server_->address();
}

void BrokerServer::Shutdown() {
  if (stopping_.HasBeenNotified()) return;
  stopping_.Notify();
  if (refresher_.joinable()) refresher_.join();
  if (beat_.joinable()) beat_.join();
  metrics_server_.reset();
  if (service_ != nullptr) service_->Shutdown();
  if (images_ != nullptr) images_->Stop();
  if (broker_ != nullptr) broker_->Stop();
  if (blocks_ != nullptr) blocks_->Stop();
  if (operator_server_ != nullptr) {
    operator_server_->Shutdown(GrpcTimeout(kShutdownPatience));
    operator_server_->Wait();
  }
  if (server_ != nullptr) {
    server_->Shutdown(GrpcTimeout(kShutdownPatience));
    server_->Wait();
  }
  if (descriptors_ != nullptr) descriptors_->Stop();
}

}  // namespace palimpsest
