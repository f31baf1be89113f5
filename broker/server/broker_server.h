// A whole broker in one object: state directory, pool, images, both sockets, metrics.
//
// Threads: Start and Shutdown from one thread; the parts have their own.
#ifndef PALIMPSEST_BROKER_SERVER_BROKER_SERVER_H_
#define PALIMPSEST_BROKER_SERVER_BROKER_SERVER_H_

#include <functional>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "broker/blocks/block_service.h"
#include "broker/blocks/block_store.h"
#include "broker/device/cuda_pool.h"
#include "broker/device/slab_device.h"
#include "broker/server/broker.h"
#include "broker/server/broker_config.h"
#include "broker/server/broker_metrics.h"
#include "broker/server/descriptor_server.h"
#include "broker/server/hand_over.h"
#include "broker/server/image_manager.h"
#include "broker/server/journal.h"
#include "broker/server/session_service.h"
#include "common/metrics.h"
#include "common/mutex.h"
#include "common/running_clock.h"
#include "grpcpp/server.h"

namespace palimpsest {

// What the configuration asks of the pool, once the models' shapes are known.
struct PoolPlan {
  std::vector<TenantConfig> tenants;
  std::vector<uint32_t> image_slabs;
  std::vector<Bytes> context_allowance;
  std::vector<absl::Duration> hibernate_after;
  // Of all images, those with equal folders counted once.
  Bytes image_bytes;
  // Of a KV block, on all ranks together.
  std::vector<Bytes> block_bytes;
};

// Reads each model's config.json. InvalidArgument if the tenants' promises cannot be kept together.
absl::StatusOr<PoolPlan> PlanPool(const BrokerConfig& config);

class BrokerServer {
 public:
  // Makes the pool of back-end cuda; OpenCudaPool outside of tests.
  using CudaPoolFactory =
      std::function<absl::StatusOr<std::unique_ptr<SlabDevice>>(const CudaPool&)>;

  // What tests put in the place of parts of the block store, or below them; nothing outside.
  struct BlockSeams {
    DramArena::Maker chunk_maker;
    TierWrapper tier_wrapper;
  };

  // Returns once both sockets accept. `fatal` is called, on any thread, when the broker cannot go
  // on.
  static absl::StatusOr<std::unique_ptr<BrokerServer>> Start(
      const BrokerConfig& config, std::function<void(const absl::Status&)> fatal,
      const CudaPoolFactory& cuda = OpenCudaPool, BlockSeams seams = {});
  ~BrokerServer() { Shutdown(); }
  BrokerServer(const BrokerServer&) = delete;
  BrokerServer& operator=(const BrokerServer&) = delete;

  // Ends all calls and threads. Workers keep what they hold, for the next broker. Idempotent.
  void Shutdown();

  Broker& broker() { return *broker_; }
  // Null without tiers.
  BlockStore* blocks() { return blocks_.get(); }
  const DescriptorServer& descriptors() const { return *descriptors_; }
  const Metrics& metrics() const { return metrics_; }
  // Where metrics are served; empty if they are not.
  std::string metrics_address() const;

 private:
  struct SocketPair {
    std::string control;
    std::string descriptors;
    std::optional<TenantId> only;
    std::optional<uid_t> owner;
  };

  explicit BrokerServer(const BrokerConfig& config);

  absl::Status OpenState(const PoolPlan& plan, std::function<void(const absl::Status&)> fatal,
                         const CudaPoolFactory& cuda, BlockSeams seams);
  // Of memory for copies of images.
  uint32_t PeerSlabs() const;
  // FailedPrecondition if the GPU for that is not there.
  absl::Status CheckPeer();
  // Opens device_; whether its slabs are ordinary pages of the host.
  absl::StatusOr<bool> OpenDevice(const CudaPoolFactory& cuda);
  // Ordinary memory that pool and images will take besides what the workers of an earlier broker
  // bring back.
  Bytes MissingMemory(const PoolPlan& plan, const std::set<std::string>& expected,
                      bool ordinary_pages) const;
  absl::Status OpenBlocks(const PoolPlan& plan, BlockSeams seams);
  absl::Status StartDescriptors();
  absl::Status StartControl();
  // What operators alone may ask.
  absl::Status StartOperator();
  absl::Status StartMetrics();
  void RefreshMetrics();
  // Keeps clock_ going.
  void Beat();

  const BrokerConfig config_;
  std::vector<SocketPair> sockets_;
  Metrics metrics_;
  BrokerMetrics broker_metrics_;
  RunningClock clock_;
  HandOverTable hand_overs_;
  std::unique_ptr<Journal> journal_;
  std::unique_ptr<SlabDevice> device_;
  std::unique_ptr<ImageManager> images_;
  std::unique_ptr<BlockStore> blocks_;
  std::unique_ptr<Broker> broker_;
  std::unique_ptr<DescriptorServer> descriptors_;
  std::unique_ptr<SessionService> service_;
  std::unique_ptr<BlockService> block_service_;
  std::unique_ptr<BlockAdminService> operator_service_;
  std::unique_ptr<grpc::Server> server_;
  std::unique_ptr<grpc::Server> operator_server_;
  std::unique_ptr<MetricsServer> metrics_server_;
  Notification stopping_;
  std::thread refresher_;
  std::thread beat_;
};

}  // namespace palimpsest

#endif  // PALIMPSEST_BROKER_SERVER_BROKER_SERVER_H_
