#include "broker/blocks/testing/soak_node.h"

#include <fcntl.h>
#include <unistd.h>

#include <csignal>
#include <filesystem>
#include <random>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "common/file.h"
#include "common/grpc_status.h"
#include "common/grpc_time.h"
#include "common/testing/eventually.h"

namespace palimpsest {
namespace {

namespace fs = std::filesystem;

constexpr absl::Duration kPatience = absl::Seconds(60);
// A breaker that opened again and again backs off for so long.
constexpr absl::Duration kServingPatience = absl::Minutes(3);
// Of T1, and of the tiers from the top: so small that blocks leave each of them all the time.
constexpr int kDramMiB = 12;
constexpr int kLowerMiB[] = {16, 20, 48, 64};
// Descriptors that a broker may have more of without that being a leak: connections that end.
constexpr size_t kSpareDescriptors = 16;
constexpr v1::Tier kTiers[] = {v1::TIER_DRAM, v1::TIER_CXL, v1::TIER_REMOTE, v1::TIER_NVME,
                               v1::TIER_DIRECTORY};

absl::StatusOr<size_t> OpenDescriptors(pid_t pid) {
  std::error_code error;
  size_t count = 0;
  for ([[maybe_unused]] const auto& entry :
       fs::directory_iterator(absl::StrCat("/proc/", pid, "/fd"), error)) {
    ++count;
  }
  if (error) return absl::InternalError(absl::StrCat("no descriptors of ", pid));
  return count;
}

template <typename Stub, typename Request, typename Response>
absl::Status Call(Stub& stub,
                  grpc::Status (Stub::*method)(grpc::ClientContext*, const Request&, Response*),
                  const Request& request, Response* response) {
  grpc::ClientContext context;
  context.set_deadline(GrpcTimeout(kPatience));
  return FromGrpcStatus((stub.*method)(&context, request, response));
}

std::shared_ptr<grpc::Channel> ChannelTo(const std::string& socket) {
  grpc::ChannelArguments arguments;
  arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
  return grpc::CreateCustomChannel("unix:" + socket, grpc::InsecureChannelCredentials(), arguments);
}

}  // namespace

const std::vector<std::string>& SoakNode::Tenants() {
  static const std::vector<std::string> tenants = {"alpha", "beta", "gamma"};
  return tenants;
}

const std::vector<std::string>& SoakNode::LowerTiers() {
  static const std::vector<std::string> tiers = {"cxl", "remote", "nvme", "directory"};
  return tiers;
}

SoakNode::SoakNode(uint64_t seed) : seed_(seed), node_(TestNode::kImageSlabs - 2, Tenants()) {}

std::string SoakNode::Yaml() const {
  return absl::StrCat(
      node_.Config(16, "  reattach_grace: 500ms\n"),
      "tiers:\n"
      "  dram: {bytes: ",
      kDramMiB, " MiB, chunk_bytes: 2 MiB, unmap_deadline: 30s}\n  cxl: {bytes: ", kLowerMiB[0],
      " MiB, emulated: {bytes_per_second: 8 GiB, latency: 1us}}\n  remote: {bytes: ", kLowerMiB[1],
      " MiB, peer: \"", peer_address_,
      "\", transports: tcp, timeout: 2s}\n  nvme: {bytes: ", kLowerMiB[2], " MiB, path: ", folder(),
      "/disk}\n  directory: {bytes: ", kLowerMiB[3], " MiB, path: ", folder(),
      "/shared}\n  staging: 8 MiB\n  policy: predictive\n");
}

absl::Status SoakNode::Start() {
  fs::create_directory(folder() + "/shared");
  if (absl::Status status = StartPeer(); !status.ok()) return status;
  return StartBroker();
}

absl::Status SoakNode::StartPeer() {
  std::vector<std::string> arguments = {"--bytes", absl::StrCat(kLowerMiB[1], "MiB"),
                                        "--transports", "tcp"};
  arguments.insert(arguments.end(),
                   {"--listen", peer_address_.empty() ? "127.0.0.1:0" : peer_address_});
  peer_.reset();
  absl::Status failed;
  // Its port may be busy for a moment after it was killed.
  const bool started = Eventually(
      [&] {
        auto peer = PeerProcess::Start(arguments);
        failed = peer.status();
        if (peer.ok()) peer_.emplace(*std::move(peer));
        return peer_.has_value();
      },
      kPatience);
  if (!started) return failed;
  peer_address_ = peer_->address;
  return absl::OkStatus();
}

absl::Status SoakNode::StartBroker() {
  KillBroker();
  const std::string path = folder() + "/broker.yaml";
  if (absl::Status status = WriteFileAtomically(path, Yaml()); !status.ok()) return status;
  const UniqueFd output(open(said().c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600));
  auto broker = WorkerProcess::Start(
      {"broker/blocks/faulty_broker", path, absl::StrCat(seed_ + generation_)}, output.get());
  if (!broker.ok()) return broker.status();
  {
    MutexLock lock(&broker_mu_);
    broker_.emplace(*std::move(broker));
  }
  stub_ = v1::Broker::NewStub(ChannelTo(control()));
  operator_ = v1::BlockAdmin::NewStub(ChannelTo(folder() + "/state/operator.sock"));
  descriptors_.reset();
  if (!Eventually([&] { return Status().ok() || broker_->Exited(); }, kPatience) ||
      broker_->Exited()) {
    return absl::UnavailableError("the broker does not serve");
  }
  ++generation_;
  broker_down_ = false;
  return AwaitServing();
}

void SoakNode::KillBroker() {
  MutexLock lock(&broker_mu_);
  if (!broker_.has_value()) return;
  broker_down_ = true;
  (void)broker_->Kill();
  (void)broker_->AwaitExit(kPatience);
  broker_.reset();
}

void SoakNode::KillPeer() {
  (void)peer_->child.handle().Kill();
  (void)peer_->child.handle().AwaitExit(kPatience);
}

absl::StatusOr<std::string> SoakNode::Ask(const std::string& command) {
  MutexLock lock(&broker_mu_);
  auto answer = broker_->Do(command);
  if (answer.ok()) return answer;
  return absl::Status(answer.status().code(),
                      absl::StrCat(command, ": ", answer.status().message()));
}

absl::Status SoakNode::Tell(const std::string& command) { return Ask(command).status(); }

absl::Status SoakNode::Trim(v1::Tier tier, const std::string& tenant, uint64_t keep_bytes) {
  v1::TrimRequest request;
  request.set_tier(tier);
  request.set_tenant(tenant);
  request.set_keep_bytes(keep_bytes);
  v1::TrimResponse ignored;
  return Call(*operator_, &v1::BlockAdmin::Stub::Trim, request, &ignored);
}

absl::Status SoakNode::SetLimit(v1::Tier tier, const std::string& tenant, uint64_t bytes) {
  v1::SetLimitRequest request;
  request.set_tier(tier);
  request.set_tenant(tenant);
  request.set_bytes(bytes);
  v1::SetLimitResponse ignored;
  return Call(*operator_, &v1::BlockAdmin::Stub::SetLimit, request, &ignored);
}

absl::Status SoakNode::Purge(const std::string& tenant) {
  v1::PurgeRequest request;
  request.set_tenant(tenant);
  request.set_wait_seconds(absl::ToDoubleSeconds(kPatience / 2));
  v1::PurgeResponse ignored;
  return Call(*operator_, &v1::BlockAdmin::Stub::Purge, request, &ignored);
}

absl::Status SoakNode::CheckTiers() {
  v1::CheckTiersRequest request;
  request.set_block_bytes(64 << 10);
  request.set_blocks(4);
  request.set_wait_seconds(10);
  v1::CheckTiersResponse response;
  if (auto status = Call(*operator_, &v1::BlockAdmin::Stub::CheckTiers, request, &response);
      !status.ok()) {
    return status;
  }
  std::string wrong;
  for (const v1::CheckedTier& tier : response.tiers()) {
    if (!tier.error().empty()) absl::StrAppend(&wrong, " ", tier.name(), ": ", tier.error());
  }
  return wrong.empty() ? absl::OkStatus() : absl::DataLossError("round trips through" + wrong);
}

absl::StatusOr<v1::GetStatusResponse> SoakNode::Status() {
  grpc::ClientContext context;
  context.set_deadline(GrpcTimeout(absl::Seconds(10)));
  context.set_wait_for_ready(true);
  v1::GetStatusResponse status;
  const absl::Status got =
      FromGrpcStatus(stub_->GetStatus(&context, v1::GetStatusRequest(), &status));
  if (!got.ok()) return got;
  return status;
}

absl::Status SoakNode::AwaitServing() {
  std::string missing;
  const auto serves = [&] {
    const auto status = Status();
    missing = status.ok() ? "" : status.status().ToString();
    if (!status.ok()) return false;
    for (const v1::TierMemory& tier : status->tiers()) {
      if (tier.tier() != "dram" && (!tier.serving() || tier.in_flight() > 0)) {
        missing = absl::StrCat(tier.tier(), ": ", tier.last_failure());
      }
    }
    return missing.empty() && status->tiers_size() == 5;
  };
  if (Eventually(serves, kServingPatience)) return absl::OkStatus();
  return absl::DeadlineExceededError(absl::StrCat("a tier does not serve again: ", missing));
}

absl::Status SoakNode::Heal() {
  RestoreFolder();
  if (peer_->child.handle().Exited()) {
    if (absl::Status status = StartPeer(); !status.ok()) return status;
  }
  SignalPeer(SIGCONT);
  if (broker_down_) {
    if (absl::Status status = StartBroker(); !status.ok()) return status;
  }
  SignalBroker(SIGCONT);
  if (absl::Status status = Tell("memory given"); !status.ok()) return status;
  for (const std::string& tier : LowerTiers()) {
    for (const std::string& command : {"faults " + tier, "go-on " + tier}) {
      if (absl::Status status = Tell(command); !status.ok()) return status;
    }
  }
  const uint64_t share = (uint64_t{kDramMiB} << 20) / Tenants().size();
  for (const std::string& tenant : Tenants()) {
    if (absl::Status status = SetLimit(v1::TIER_DRAM, tenant, share); !status.ok()) return status;
  }
  return AwaitServing();
}

absl::Status SoakNode::LedgerAdds(const v1::GetStatusResponse& status) const {
  const auto slabs = uint64_t{status.free_slabs()} + status.granted_slabs() +
                     status.revoking_slabs() + status.cleaning_slabs() + status.quarantined_slabs();
  if (slabs != status.pool_slabs()) {
    return absl::InternalError(
        absl::StrCat(slabs, " slabs in all states, of ", status.pool_slabs()));
  }
  for (const v1::TierMemory& tier : status.tiers()) {
    if (tier.used_bytes() > tier.capacity_bytes() || tier.quarantined_bytes() > tier.used_bytes()) {
      return absl::InternalError(absl::StrCat(tier.tier(), " uses ", tier.used_bytes(), " of ",
                                              tier.capacity_bytes(), " bytes, ",
                                              tier.quarantined_bytes(), " in quarantine"));
    }
    for (const v1::TenantTier& tenant : tier.tenants()) {
      if (tenant.stored_blocks() - tenant.removed_blocks() == tenant.blocks()) continue;
      return absl::InternalError(absl::StrCat(
          tier.tier(), " of ", tenant.tenant(), ": ", tenant.stored_blocks(), " stored, ",
          tenant.removed_blocks(), " removed, ", tenant.blocks(), " there"));
    }
  }
  return absl::OkStatus();
}

absl::Status SoakNode::CheckLedger() {
  if (absl::Status status = Tell("check"); !status.ok()) return status;
  const auto status = Status();
  if (!status.ok()) return status.status();
  return LedgerAdds(*status);
}

absl::Status SoakNode::CheckLeaks() {
  std::string left;
  const auto empty = [&] {
    for (const v1::Tier tier : kTiers) {
      if (const absl::Status trimmed = Trim(tier, "", 0); !trimmed.ok()) {
        left = trimmed.ToString();
        return false;
      }
    }
    const auto status = Status();
    left = status.ok() ? "" : status.status().ToString();
    if (!status.ok()) return false;
    for (const v1::TierMemory& tier : status->tiers()) {
      if (tier.used_bytes() != tier.quarantined_bytes() || tier.in_flight() > 0) {
        absl::StrAppend(&left, " ", tier.ShortDebugString());
      }
      for (const v1::TenantTier& tenant : tier.tenants()) {
        if (tenant.used_bytes() + tenant.blocks() == 0) continue;
        absl::StrAppend(&left, " ", tier.tier(), ": ", tenant.ShortDebugString());
      }
    }
    return left.empty();
  };
  if (!Eventually(empty, kPatience)) {
    return absl::InternalError(absl::StrCat("not all can be taken out:", left));
  }
  const absl::StatusOr<size_t> descriptors = OpenDescriptors(broker_->pid());
  if (!descriptors.ok()) return descriptors.status();
  if (!descriptors_.has_value()) descriptors_ = *descriptors;
  if (*descriptors > *descriptors_ + kSpareDescriptors) {
    return absl::InternalError(absl::StrCat("the broker has ", *descriptors,
                                            " descriptors with nothing in its tiers, ",
                                            *descriptors_, " when that was so first"));
  }
  return CheckLedger();
}

int SoakNode::DamageFiles(uint64_t seed, int most) {
  std::mt19937_64 random(seed);
  std::vector<std::string> files;
  std::error_code ignored;
  for (fs::recursive_directory_iterator at(folder() + "/shared/blocks", ignored), end; at != end;
       at.increment(ignored)) {
    files.push_back(at->path());
  }
  // Behind the tables: a block's file has a page of its own data first, the disk all of its own.
  const std::pair<std::string, off_t> disk(folder() + "/disk", off_t{kLowerMiB[2]} << 19);
  int damaged = 0;
  for (int i = 0; i < most; ++i) {
    const auto [path, from] =
        i % 2 == 0 || files.empty() ? disk : std::pair(files[random() % files.size()], off_t{4096});
    const UniqueFd file(open(path.c_str(), O_RDWR | O_CLOEXEC));
    const off_t size = file.valid() ? lseek(file.get(), 0, SEEK_END) : 0;
    if (size <= from) continue;
    const off_t at = from + static_cast<off_t>(random() % static_cast<uint64_t>(size - from));
    char byte = 0;
    if (pread(file.get(), &byte, 1, at) != 1) continue;
    byte = static_cast<char>(byte ^ 1);
    damaged += pwrite(file.get(), &byte, 1, at) == 1 ? 1 : 0;
  }
  return damaged;
}

void SoakNode::RemoveFolder() {
  std::error_code ignored;
  fs::rename(folder() + "/shared", folder() + "/away", ignored);
}

void SoakNode::RestoreFolder() {
  std::error_code ignored;
  if (fs::exists(folder() + "/away")) fs::rename(folder() + "/away", folder() + "/shared", ignored);
}

}  // namespace palimpsest
