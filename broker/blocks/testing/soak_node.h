// A node to be worn: a broker with all of its tiers over small media, another process that lends
// it memory, and what a soak does to them.
//
// Errors are of the node, and end a soak, but where something else is said.
//
// Threads: thread-safe but for what starts and kills processes.
#ifndef PALIMPSEST_BROKER_BLOCKS_TESTING_SOAK_NODE_H_
#define PALIMPSEST_BROKER_BLOCKS_TESTING_SOAK_NODE_H_

#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "broker/server/testing/test_node.h"
#include "broker/server/testing/worker_process.h"
#include "broker/tier/remote/peer_process.h"
#include "common/mutex.h"
#include "grpcpp/grpcpp.h"
#include "proto/palimpsest/v1/block_store.grpc.pb.h"
#include "proto/palimpsest/v1/broker.grpc.pb.h"

namespace palimpsest {

class SoakNode {
 public:
  static const std::vector<std::string>& Tenants();
  // Below T1, from the top, as in the configuration.
  static const std::vector<std::string>& LowerTiers();

  explicit SoakNode(uint64_t seed);

  absl::Status Start();
  // Kills it if it runs.
  absl::Status StartBroker();
  absl::Status StartPeer();
  void KillBroker();
  void KillPeer();
  // Counts brokers, from 1.
  uint64_t generation() const { return generation_; }
  // Whether the broker has been killed, and not started again.
  bool broker_down() const { return broker_down_; }

  // To the broker's process (faulty_broker_main.cc).
  absl::Status Tell(const std::string& command);
  absl::StatusOr<std::string> Ask(const std::string& command);
  // Stops the process, or lets it go on.
  void SignalBroker(int signal) { (void)broker_->Signal(signal); }
  void SignalPeer(int signal) { (void)peer_->child.handle().Signal(signal); }

  // As the operator. Errors are the call's.
  absl::Status Trim(v1::Tier tier, const std::string& tenant, uint64_t keep_bytes);
  absl::Status SetLimit(v1::Tier tier, const std::string& tenant, uint64_t bytes);
  absl::Status Purge(const std::string& tenant);
  absl::Status CheckTiers();
  absl::StatusOr<v1::GetStatusResponse> Status();

  // Undoes everything: faults, limits, folders, processes that stand still or are gone.
  absl::Status Heal();
  absl::Status AwaitServing();
  // That its sums are right, the broker's own and what it says of them.
  absl::Status CheckLedger();
  // That all can be taken out, and nothing is left: no byte, and no more descriptors than the first
  // time. Requires that no worker holds anything.
  absl::Status CheckLeaks();

  // Changes single bytes of what tiers keep in files; how many.
  int DamageFiles(uint64_t seed, int most);
  // The folder of the tier is gone, or back.
  void RemoveFolder();
  void RestoreFolder();

  std::string Hello(const std::string& tenant) const { return node_.Hello(tenant); }
  std::string control() const { return node_.control(); }
  const std::string& folder() const { return node_.folder(); }
  std::string said() const { return node_.folder() + "/said"; }
  void Keep() { node_.Keep(); }

 private:
  std::string Yaml() const;
  absl::Status AwaitBroker();
  absl::Status LedgerAdds(const v1::GetStatusResponse& status) const;

  const uint64_t seed_;
  TestNode node_;
  std::optional<PeerProcess> peer_;
  std::string peer_address_;
  Mutex broker_mu_;  // one command at a time
  std::optional<WorkerProcess> broker_;
  std::unique_ptr<v1::Broker::Stub> stub_;
  std::unique_ptr<v1::BlockAdmin::Stub> operator_;
  std::atomic<uint64_t> generation_ = 0;
  std::atomic<bool> broker_down_ = false;
  // Of the broker, when nothing was in its tiers for the first time.
  std::optional<size_t> descriptors_;
};

}  // namespace palimpsest

#endif  // PALIMPSEST_BROKER_BLOCKS_TESTING_SOAK_NODE_H_
