// Rotating layers over real sockets: a broker, and a worker in a process of its own that carries
// out what it is told, without a model.
#include "broker/server/testing/broker_fixture.h"

namespace palimpsest {
namespace {

class BrokerRotationTest : public BrokerFixture {
 protected:
  // An embedding, eight layers and a head, of one slab each.
  static constexpr int kLayers = 8;
  static constexpr int kWhole = kLayers + 2;
  static constexpr int kPool = kWhole + 4;

  BrokerRotationTest() : BrokerFixture(kLayers) {}

  static std::string Policy() {
    return Hasty() +
           "  reversion_delay: 50ms\n  report_patience: 60s\n  rotation: {enabled: true}\n";
  }

  // A worker whose demand exceeds what is free by two slabs.
  std::unique_ptr<WorkerProcess> Demanding() {
    auto worker = StartWorker();
    Must(*worker, "rotates yes");
    Must(*worker, node_.Hello("alpha"));
    Must(*worker, "attach " + node_.control());
    Must(*worker, "activate");
    Must(*worker, absl::StrCat("await-slabs parameter ", kWhole));
    Must(*worker, "report active");
    Must(*worker, "kv 4 4");
    Must(*worker, "await-slabs kv 4");
    Must(*worker, "kv 6 6");
    return worker;
  }
};

TEST_F(BrokerRotationTest, LayersMakeRoomForKvAndComeBack) {
  StartBroker(node_.Config(kPool, Policy()));
  auto worker = Demanding();
  Must(*worker, "await-freed 2");
  Must(*worker, "await-slabs kv 6");
  Must(*worker, "await-slabs slot 1");
  Must(*worker, absl::StrCat("await-slabs parameter ", kWhole - 3));
  const v1::TenantMemory alpha = Status().tenants(0);
  EXPECT_EQ(alpha.freed_layers(), 2u);
  EXPECT_EQ(alpha.rotating_stages_size(), 3);
  EXPECT_EQ(alpha.slot_slabs(), 1u);
  EXPECT_EQ(alpha.parameter_slabs(), static_cast<uint32_t>(kWhole - 3));
  EXPECT_GT(alpha.link_limit_bytes_per_second(), 0);

  Must(*worker, "kv 1 1");
  Must(*worker, "report active unused");
  Must(*worker, "await-freed 0");
  Must(*worker, absl::StrCat("await-slabs parameter ", kWhole));
  Must(*worker, "await-slabs slot 0");
  // The worker says so before the broker has heard of it.
  EXPECT_TRUE(Eventually([this] {
    int changes = 0;
    const v1::GetStatusResponse status = Status();
    for (const v1::Transfer& transfer : status.transfers()) {
      changes += transfer.kind() == v1::Transfer::KIND_ROTATE ? 1 : 0;
    }
    return changes >= 2;
  }));
  EXPECT_EQ(Status().tenants(0).link_limit_bytes_per_second(), 0);
}

TEST_F(BrokerRotationTest, ARestartedBrokerKnowsWhatRotates) {
  StartBroker(node_.Config(kPool, Policy()));
  auto worker = Demanding();
  Must(*worker, "await-freed 2");
  Must(*worker, "await-slabs kv 6");
  server_.reset();
  Must(*worker, "await-lost");
  Must(*worker, "drop");
  StartBroker(node_.Config(kPool, Policy()));
  Must(*worker, node_.Hello("alpha"));
  Must(*worker, "reattach " + node_.control());
  const v1::TenantMemory alpha = Status().tenants(0);
  EXPECT_EQ(alpha.freed_layers(), 2u);
  EXPECT_EQ(alpha.slot_slabs(), 1u);
  EXPECT_EQ(alpha.parameter_slabs(), static_cast<uint32_t>(kWhole - 3));
  EXPECT_EQ(alpha.kv_slabs(), 6u);
  worker.reset();
  EXPECT_TRUE(EventuallyFree(kPool));
}

TEST_F(BrokerRotationTest, AWorkerThatDoesNotRotateInTimeIsKilled) {
  StartBroker(node_.Config(kPool, Policy()));
  auto worker = StartWorker();
  Must(*worker, "rotates yes");
  Must(*worker, node_.Hello("alpha"));
  Must(*worker, "attach " + node_.control());
  Must(*worker, "activate");
  Must(*worker, absl::StrCat("await-slabs parameter ", kWhole));
  Must(*worker, "report active");
  Must(*worker, "manners silent");
  Must(*worker, "kv 6 6");
  EXPECT_TRUE(EventuallyFree(kPool));
}

}  // namespace
}  // namespace palimpsest
