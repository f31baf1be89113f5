// Prints p50 and p99 of calls to the block store of a broker in this process, over its Unix socket.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <vector>

#include "absl/strings/str_cat.h"
#include "broker/blocks/testing/socket_block_worker.h"
#include "broker/server/broker_server.h"
#include "broker/server/testing/test_node.h"
#include "common/grpc_status.h"
#include "common/monotonic_time.h"
#include "common/yaml_config.h"

namespace palimpsest {
namespace {

constexpr uint32_t kBlocks = 1000;
constexpr uint64_t kBlockBytes = 64 << 10;
constexpr int kRounds = 500;

absl::Status Fill(SocketBlockWorker& worker) {
  absl::StatusOr<uint32_t> there = 0;
  if (!Eventually([&] {
        there = worker.Put(1, kBlocks);
        return !there.ok() || *there == kBlocks;
      })) {
    return absl::DeadlineExceededError("the blocks found no room");
  }
  return there.status();
}

// Acquires all and ends the request; how long each of these calls took.
absl::Status MeasureAcquire(SocketBlockWorker& worker) {
  std::vector<double> acquire, end;
  v1::AcquireRequest request;
  *request.mutable_session() = worker.session();
  *request.mutable_chain() = worker.Chain(1, kBlocks);
  for (int i = 1; i <= kRounds; ++i) {
    request.set_request_id(static_cast<uint64_t>(i));
    grpc::ClientContext context;
    v1::AcquireResponse acquired;
    const absl::Time start = MonotonicNow();
    absl::Status status = FromGrpcStatus(worker.stub().Acquire(&context, request, &acquired));
    const absl::Time middle = MonotonicNow();
    if (!status.ok()) return status;
    if (acquired.blocks_size() != kBlocks) return absl::InternalError("not all of them came");
    if (status = worker.EndRequest(request.request_id()); !status.ok()) return status;
    acquire.push_back(absl::ToDoubleMicroseconds(middle - start));
    end.push_back(absl::ToDoubleMicroseconds(MonotonicNow() - middle));
  }
  for (auto& [name, times] : {std::pair("Acquire of 1,000 blocks", &acquire),
                              std::pair("EndRequest, 1,000 pins", &end)}) {
    std::sort(times->begin(), times->end());
    std::printf("%-28s p50 %7.1f us   p99 %7.1f us\n", name, (*times)[times->size() / 2],
                (*times)[times->size() * 99 / 100]);
  }
  return absl::OkStatus();
}

absl::Status Run() {
  TestNode node;
  auto yaml = YamlConfig::Parse(absl::StrCat(node.Config(16), "tiers:\n  dram: {bytes: 256 MiB}\n"),
                                "broker.yaml");
  if (!yaml.ok()) return yaml.status();
  const auto config = ReadBrokerConfig(*yaml, "");
  if (!config.ok()) return config.status();
  auto server = BrokerServer::Start(*config, [](const absl::Status& status) {
    std::fprintf(stderr, "%s\n", status.ToString().c_str());
    std::exit(EXIT_FAILURE);
  });
  if (!server.ok()) return server.status();
  SocketBlockWorker worker(kBlockBytes);
  absl::Status status = worker.Hello(node.descriptors(), "alpha", TestNode::Secret("alpha"));
  if (status.ok()) status = worker.Attach(node.control());
  if (status.ok()) status = Fill(worker);
  if (status.ok()) status = MeasureAcquire(worker);
  return status;
}

}  // namespace
}  // namespace palimpsest

int main() {
  const absl::Status status = palimpsest::Run();
  if (!status.ok()) std::fprintf(stderr, "%s\n", status.ToString().c_str());
  return status.ok() ? EXIT_SUCCESS : EXIT_FAILURE;
}
