// Round trips on the control socket of a whole broker: GetStatus, and SetKvTarget answered by
// KvPressure on an attached session. Prints p50 and p99 of each in microseconds.
#include <grpcpp/grpcpp.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <string>
#include <vector>

#include "absl/time/clock.h"
#include "broker/server/broker_server.h"
#include "broker/server/testing/scripted_worker.h"
#include "broker/server/testing/test_node.h"
#include "common/yaml_config.h"

namespace palimpsest {
namespace {

constexpr int kPoolSlabs = 16;
constexpr int kRounds = 5000;
constexpr absl::Duration kPatience = absl::Seconds(20);

void Must(const absl::Status& status) {
  if (status.ok()) return;
  std::fprintf(stderr, "%s\n", status.ToString().c_str());
  std::exit(EXIT_FAILURE);
}

void Measure(const char* name, const std::function<void(int)>& round_trip) {
  std::vector<double> microseconds;
  for (int i = 0; i < kRounds; ++i) {
    const absl::Time start = absl::Now();
    round_trip(i);
    microseconds.push_back(absl::ToDoubleMicroseconds(absl::Now() - start));
  }
  std::sort(microseconds.begin(), microseconds.end());
  std::printf("%-28s p50 %7.1f us   p99 %7.1f us\n", name, microseconds[kRounds / 2],
              microseconds[kRounds * 99 / 100]);
}

void Run() {
  TestNode node;
  auto yaml = YamlConfig::Parse(node.Config(kPoolSlabs), "broker.yaml");
  Must(yaml.status());
  const auto config = ReadBrokerConfig(*yaml, "");
  Must(config.status());
  auto server = BrokerServer::Start(*config, [](const absl::Status& status) { Must(status); });
  Must(server.status());
  ScriptedWorker worker;
  Must(worker.Hello(node.descriptors(), "alpha", TestNode::Secret("alpha")));
  Must(worker.Attach(node.control()));
  const auto stub = v1::Broker::NewStub(
      grpc::CreateChannel("unix:" + node.control(), grpc::InsecureChannelCredentials()));
  Measure("GetStatus", [&](int) {
    grpc::ClientContext context;
    v1::GetStatusResponse response;
    if (!stub->GetStatus(&context, v1::GetStatusRequest(), &response).ok()) std::abort();
  });
  // Another tenant has half of the pool and wants to keep it, so that no target above the other
  // half can be met.
  ScriptedWorker other;
  Must(other.Hello(node.descriptors(), "beta", TestNode::Secret("beta")));
  Must(other.Attach(node.control()));
  Must(other.SetKvTarget(kPoolSlabs / 2, kPoolSlabs / 2));
  Must(other.AwaitSlabs(v1::SLAB_ROLE_KV, kPoolSlabs / 2, kPatience));
  Must(worker.SetKvTarget(kPoolSlabs / 2, 1));
  Must(worker.AwaitSlabs(v1::SLAB_ROLE_KV, kPoolSlabs / 2, kPatience));
  size_t pressure = 0;
  Measure("SetKvTarget to KvPressure", [&](int round) {
    Must(worker.SetKvTarget(kPoolSlabs - round % 2, 1));
    Must(worker.AwaitPressure(++pressure, kPatience));
  });
}

}  // namespace
}  // namespace palimpsest

int main() {
  palimpsest::Run();
  return 0;
}
