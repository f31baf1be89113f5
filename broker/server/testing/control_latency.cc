#include "broker/server/testing/control_latency.h"

#include <grpcpp/grpcpp.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <functional>

#include "broker/server/broker_server.h"
#include "broker/server/testing/scripted_worker.h"
#include "broker/server/testing/test_node.h"
#include "common/grpc_status.h"
#include "common/monotonic_time.h"
#include "common/yaml_config.h"

namespace palimpsest {
namespace {

constexpr int kPoolSlabs = 16;
constexpr absl::Duration kPatience = absl::Seconds(20);

absl::StatusOr<ControlLatency> Measure(const std::string& name, int rounds,
                                       const std::function<absl::Status(int)>& round_trip) {
  std::vector<absl::Duration> times;
  for (int i = 0; i < rounds; ++i) {
    const absl::Time start = MonotonicNow();
    if (absl::Status status = round_trip(i); !status.ok()) return status;
    times.push_back(MonotonicNow() - start);
  }
  std::sort(times.begin(), times.end());
  return ControlLatency{name, times[times.size() / 2], times[times.size() * 99 / 100]};
}

absl::Status Attach(const TestNode& node, const std::string& tenant, ScriptedWorker& worker) {
  absl::Status status = worker.Hello(node.descriptors(), tenant, TestNode::Secret(tenant));
  if (status.ok()) status = worker.Attach(node.control());
  return status;
}

// Half of the pool, wanted and needed.
absl::Status TakeHalf(ScriptedWorker& worker, uint32_t needed) {
  const absl::Status status = worker.SetKvTarget(kPoolSlabs / 2, needed);
  if (!status.ok()) return status;
  return worker.AwaitSlabs(v1::SLAB_ROLE_KV, kPoolSlabs / 2, kPatience);
}

}  // namespace

absl::StatusOr<std::vector<ControlLatency>> MeasureControlLatency(int rounds) {
  TestNode node;
  auto yaml = YamlConfig::Parse(node.Config(kPoolSlabs), "broker.yaml");
  if (!yaml.ok()) return yaml.status();
  const auto config = ReadBrokerConfig(*yaml, "");
  if (!config.ok()) return config.status();
  auto server = BrokerServer::Start(*config, [](const absl::Status& status) {
    std::fprintf(stderr, "%s\n", status.ToString().c_str());
    std::exit(EXIT_FAILURE);
  });
  if (!server.ok()) return server.status();

  ScriptedWorker worker;
  if (absl::Status status = Attach(node, "alpha", worker); !status.ok()) return status;
  const auto stub = v1::Broker::NewStub(
      grpc::CreateChannel("unix:" + node.control(), grpc::InsecureChannelCredentials()));
  const auto get_status = Measure("GetStatus", rounds, [&](int) {
    grpc::ClientContext context;
    v1::GetStatusResponse response;
    return FromGrpcStatus(stub->GetStatus(&context, v1::GetStatusRequest(), &response));
  });
  if (!get_status.ok()) return get_status.status();

  // Another tenant has half of the pool and wants to keep it, so that no target above the other
  // half can be met.
  ScriptedWorker other;
  absl::Status status = Attach(node, "beta", other);
  if (status.ok()) status = TakeHalf(other, kPoolSlabs / 2);
  if (status.ok()) status = TakeHalf(worker, 1);
  if (!status.ok()) return status;
  size_t pressure = 0;
  const auto target = Measure("SetKvTarget to KvPressure", rounds, [&](int round) {
    const absl::Status sent = worker.SetKvTarget(kPoolSlabs - round % 2, 1);
    return sent.ok() ? worker.AwaitPressure(++pressure, kPatience) : sent;
  });
  if (!target.ok()) return target.status();
  return std::vector<ControlLatency>{*get_status, *target};
}

}  // namespace palimpsest
