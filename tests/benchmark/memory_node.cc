#include "tests/benchmark/memory_node.h"

#include <grpcpp/grpcpp.h>

#include <cstdlib>
#include <filesystem>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "broker/server/image_manager.h"
#include "common/file.h"
#include "common/grpc_status.h"
#include "common/monotonic_time.h"
#include "worker/model/testing.h"

namespace palimpsest {
namespace {

constexpr absl::Duration kPatience = absl::Minutes(2);
constexpr const char* kTenants[] = {"alpha", "beta", "gamma"};

constexpr int64_t kTinyTokens = 256;
constexpr int64_t kBlockTokens = 16;

absl::StatusOr<int> ImageSlabs(const std::string& model, int64_t max_sequence_tokens) {
  const absl::StatusOr<v1::ImageManifest> plan =
      PlanImage({model, max_sequence_tokens, kBlockTokens}, MiB(2));
  if (!plan.ok()) return plan.status();
  return static_cast<int>(plan->image_bytes() / plan->slab_bytes());
}

absl::Duration SumOf(prometheus::Histogram& histogram) {
  return absl::Seconds(histogram.Collect().histogram.sample_sum);
}

}  // namespace

MemoryTenant::MemoryTenant() : metrics_(MetricProcess::kWorker) {}

absl::StatusOr<std::unique_ptr<MemoryTenant>> MemoryTenant::Connect(
    GrpcMemoryClient::Options options) {
  std::unique_ptr<MemoryTenant> tenant(new MemoryTenant());
  MemoryTenant* const raw = tenant.get();
  options.metrics = &raw->metrics_;
  options.on_fatal = [raw](const absl::Status& status) {
    MutexLock lock(&raw->mu_);
    raw->failure_ = status;
    raw->changed_.SignalAll();
  };
  absl::StatusOr<std::unique_ptr<GrpcMemoryClient>> client =
      GrpcMemoryClient::Connect(std::move(options));
  if (!client.ok()) return client.status();
  tenant->client_ = *std::move(client);
  tenant->client_->SetWakeup([raw] {
    MutexLock lock(&raw->mu_);
    raw->woken_ = true;
    raw->changed_.SignalAll();
  });
  // Nothing runs, so that its parameters may be taken.
  tenant->client_->SendReport(WorkerLoad{.active = false});
  tenant->pump_ = std::thread([raw] { raw->PumpLoop(); });
  return tenant;
}

MemoryTenant::~MemoryTenant() {
  if (client_ == nullptr) return;
  client_->SetWakeup(nullptr);
  {
    MutexLock lock(&mu_);
    stopping_ = true;
    changed_.SignalAll();
  }
  if (pump_.joinable()) pump_.join();
}

void MemoryTenant::PumpLoop() {
  while (true) {
    {
      MutexLock lock(&mu_);
      while (!woken_ && !stopping_) changed_.Wait(&mu_);
      if (stopping_) return;
      woken_ = false;
    }
    for (const MemoryEvent& event : client_->TakeEvents()) Handle(event, MonotonicNow());
  }
}

void MemoryTenant::Handle(const MemoryEvent& event, absl::Time now) {
  if (const auto* revoked = std::get_if<ParametersRevoked>(&event)) {
    client_->FinishParameterRevoke(revoked->id);
  }
  MutexLock lock(&mu_);
  if (const auto* mapped = std::get_if<KvMapped>(&event)) {
    kv_.insert(kv_.end(), mapped->indexes.begin(), mapped->indexes.end());
    kv_at_ = now;
  } else if (std::holds_alternative<ParametersRevoked>(event)) {
    answered_at_ = now;
  } else if (std::holds_alternative<ParametersComing>(event)) {
    coming_at_ = now;
  } else if (const auto* refused = std::get_if<ActivationRefused>(&event)) {
    failure_ = absl::UnavailableError(refused->message);
  } else if (const auto* lost = std::get_if<BrokerLost>(&event)) {
    failure_ = absl::UnavailableError(lost->reason);
  } else if (std::holds_alternative<KvRevoked>(event)) {
    failure_ = absl::InternalError("KV slabs were revoked, which this node has no reason for");
  }
  changed_.SignalAll();
}

absl::StatusOr<absl::Time> MemoryTenant::Activate() {
  {
    MutexLock lock(&mu_);
    coming_at_.reset();
  }
  client_->RequestActivation(ActivationReason::kRequest);
  const absl::Time deadline = MonotonicNow() + kPatience;
  MutexLock lock(&mu_);
  while (failure_.ok() && !coming_at_.has_value()) {
    if (changed_.WaitWithDeadline(&mu_, deadline)) {
      return absl::DeadlineExceededError("no grant of parameters came");
    }
  }
  if (!failure_.ok()) return failure_;
  return *coming_at_;
}

absl::StatusOr<absl::Time> MemoryTenant::AwaitKv(size_t slabs) {
  const absl::Time deadline = MonotonicNow() + kPatience;
  MutexLock lock(&mu_);
  while (failure_.ok() && kv_.size() < slabs) {
    if (changed_.WaitWithDeadline(&mu_, deadline)) {
      return absl::DeadlineExceededError(absl::StrCat(kv_.size(), " of ", slabs, " KV slabs came"));
    }
  }
  if (!failure_.ok()) return failure_;
  return kv_at_;
}

void MemoryTenant::ReleaseKvDownTo(size_t keep) {
  std::vector<RegionIndex> released;
  {
    MutexLock lock(&mu_);
    released.assign(kv_.begin() + static_cast<ptrdiff_t>(keep), kv_.end());
    kv_.resize(keep);
  }
  const auto target = static_cast<int32_t>(keep);
  client_->SetKvTarget(target, target);
  client_->ReleaseKv(released);
}

absl::Time MemoryTenant::answered() {
  MutexLock lock(&mu_);
  return answered_at_;
}

MemoryTenant::Spent MemoryTenant::spent() {
  return {
      .fetch_parameters = SumOf(metrics_.Histogram<"palimpsest_worker_fetch_seconds">("parameter")),
      .map_parameters = SumOf(metrics_.Histogram<"palimpsest_worker_map_seconds">("parameter")),
      .restore = SumOf(metrics_.Histogram<"palimpsest_worker_restore_seconds">()),
      .fetch_kv = SumOf(metrics_.Histogram<"palimpsest_worker_fetch_seconds">("kv")),
      .map_kv = SumOf(metrics_.Histogram<"palimpsest_worker_map_seconds">("kv")),
  };
}

absl::StatusOr<std::unique_ptr<MemoryNode>> MemoryNode::Start(const Options& options) {
  std::unique_ptr<MemoryNode> node(new MemoryNode());
  std::string pattern = "/tmp/palimpsest_bench_XXXXXX";
  if (mkdtemp(pattern.data()) == nullptr) return ErrnoStatus("mkdtemp");
  node->folder_ = pattern;
  const std::string tiny = node->folder_ + "/tiny";
  std::filesystem::create_directory(tiny);
  if (absl::Status status = WriteRandomModel(tiny, TinyModelConfig()); !status.ok()) return status;
  const absl::StatusOr<int> image = ImageSlabs(options.model, options.max_sequence_tokens);
  if (!image.ok()) return image.status();
  const absl::StatusOr<int> tiny_image = ImageSlabs(tiny, kTinyTokens);
  if (!tiny_image.ok()) return tiny_image.status();
  node->image_slabs_ = *image;
  node->tiny_slabs_ = *tiny_image;

  std::string yaml = absl::StrCat(
      "node: benchmark\nstate_dir: ", node->folder_, "/state\ncontrol_socket: ", node->folder_,
      "/broker.sock\ndescriptor_socket: ", node->folder_,
      "/descriptors.sock\npacker: ", options.packer,
      "\npool:\n  bytes: ", 2 * (node->image_slabs_ + options.extra_slabs), " MiB\n",
      // Nothing is spared, and nothing comes back unasked.
      "policy: {min_residence: 10ms, residence_restores: 0, reversion_delay: 24h}\ntenants:\n");
  for (const char* tenant : kTenants) {
    const std::string secret = absl::StrCat(node->folder_, "/", tenant);
    if (absl::Status status = WriteFileAtomically(secret, tenant, 0600); !status.ok()) {
      return status;
    }
    const bool is_tiny = absl::string_view(tenant) == "beta";
    absl::StrAppend(&yaml, "  - name: ", tenant, "\n    secret_file: ", secret,
                    "\n    model: {path: \"", is_tiny ? tiny : options.model,
                    "\", max_sequence_tokens: ",
                    is_tiny ? kTinyTokens : options.max_sequence_tokens, "}\n    floor: 0\n");
  }
  const std::string config = node->folder_ + "/broker.yaml";
  if (absl::Status status = WriteFileAtomically(config, yaml); !status.ok()) return status;
  SpawnOptions spawn;
  spawn.argv = {options.broker, "--config", config};
  absl::StatusOr<ChildProcess> broker = ChildProcess::Spawn(spawn);
  if (!broker.ok()) return broker.status();
  node->broker_.emplace(*std::move(broker));
  if (clock_getcpuclockid(node->broker_->pid(), &node->broker_clock_) != 0) {
    return absl::InternalError("no clock of the broker's processor time");
  }
  node->stub_ = v1::Broker::NewStub(grpc::CreateChannel("unix:" + node->folder_ + "/broker.sock",
                                                        grpc::InsecureChannelCredentials()));
  return node;
}

MemoryNode::~MemoryNode() {
  broker_.reset();
  std::error_code ignored;
  if (!folder_.empty()) std::filesystem::remove_all(folder_, ignored);
}

absl::StatusOr<std::unique_ptr<MemoryTenant>> MemoryNode::Connect(const std::string& tenant,
                                                                  bool verify,
                                                                  int restore_threads) {
  GrpcMemoryClient::Options options;
  options.connection.address = "unix:" + folder_ + "/broker.sock";
  options.connection.descriptor_socket = folder_ + "/descriptors.sock";
  options.connection.tenant = tenant;
  options.connection.secret = tenant;
  options.verify_parameters = verify;
  options.restore_threads = restore_threads;
  return MemoryTenant::Connect(std::move(options));
}

absl::StatusOr<v1::GetStatusResponse> MemoryNode::Status() {
  grpc::ClientContext context;
  v1::GetStatusResponse response;
  const grpc::Status status = stub_->GetStatus(&context, v1::GetStatusRequest(), &response);
  if (!status.ok()) return FromGrpcStatus(status);
  return response;
}

absl::Status MemoryNode::AwaitSettled(uint32_t free_slabs) {
  const absl::Time deadline = MonotonicNow() + kPatience;
  while (true) {
    const absl::StatusOr<v1::GetStatusResponse> status = Status();
    if (!status.ok()) return status.status();
    uint32_t moving = status->revoking_slabs() + status->cleaning_slabs();
    for (const v1::TenantMemory& tenant : status->tenants()) moving += tenant.grants_in_flight();
    if (moving == 0 && status->free_slabs() >= free_slabs) return absl::OkStatus();
    if (MonotonicNow() > deadline) {
      return absl::DeadlineExceededError(absl::StrCat(status->free_slabs(), " slabs are free and ",
                                                      moving, " grants or slabs on their way; ",
                                                      "expected ", free_slabs, " free"));
    }
    absl::SleepFor(absl::Milliseconds(2));
  }
}

absl::Duration MemoryNode::broker_cpu() const {
  timespec time = {};
  clock_gettime(broker_clock_, &time);
  return absl::DurationFromTimespec(time);
}

}  // namespace palimpsest
