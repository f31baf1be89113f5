// A broker with a pool of GPU memory, on one GPU or on two, and workers of two tenants, all in this
// process, over the test double of the driver: everything that happens to slabs on GPUs but the
// GPUs.
#ifndef PALIMPSEST_WORKER_MEMORY_CUDA_CUDA_SESSION_FIXTURE_H_
#define PALIMPSEST_WORKER_MEMORY_CUDA_CUDA_SESSION_FIXTURE_H_

#include <algorithm>
#include <cstring>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_replace.h"
#include "broker/device/cuda_slab_device.h"
#include "broker/server/broker_server.h"
#include "broker/server/testing/test_node.h"
#include "common/metrics.h"
#include "common/slab_checksum.h"
#include "common/yaml_config.h"
#include "gtest/gtest.h"
#include "worker/memory/cuda/cuda_memory.h"
#include "worker/memory/cuda/testing/fake_kernels.h"
#include "worker/memory/grpc_memory_client.h"

namespace palimpsest {

inline constexpr Bytes kSlab = MiB(2);
inline constexpr auto kSlabSize = static_cast<size_t>(kSlab.count());
inline constexpr uint32_t kPool = 24;
inline constexpr uint32_t kWorkspace = 2;

// Whether the next broker measures its links; takes a while.
inline bool measure_links = false;

inline absl::StatusOr<std::unique_ptr<SlabDevice>> FakePool(const CudaPool& pool) {
  auto device = CudaSlabDevice::Open({.driver = &FakeCudaDriver(),
                                      .gpus = pool.gpus,
                                      .slabs = pool.slabs,
                                      .slab_bytes = pool.slab_bytes,
                                      .generation = pool.generation});
  if (!device.ok()) return device.status();
  if (measure_links) {
    EXPECT_TRUE((*device)->MeasureLinks().ok());
  }
  return *std::move(device);
}

// Of a slab's piece. Tests are not optimised: memcmp is.
inline bool AllBytesAre(const char* piece, int value) {
  return *piece == static_cast<char>(value) && std::memcmp(piece, piece + 1, kSlabSize - 1) == 0;
}

// One tenant's client, and what a test wants to know of it.
struct Tenant {
  Metrics metrics{MetricProcess::kWorker};
  std::unique_ptr<CudaMemory> memory;
  std::unique_ptr<GrpcMemoryClient> client;
  std::vector<RegionIndex> kv;
  int lost = 0;
  // Rotations, which a moving image is to an engine.
  bool finishes = true;
  std::vector<RotationId> wanted;
  int settled = 0;

  void FinishRotations() {
    for (const RotationId id : std::exchange(wanted, {})) client->FinishRotation(id);
  }

  void Take() {
    for (const MemoryEvent& event : client->TakeEvents()) {
      if (const auto* mapped = std::get_if<KvMapped>(&event)) {
        kv.insert(kv.end(), mapped->indexes.begin(), mapped->indexes.end());
      } else if (const auto* revoked = std::get_if<ParametersRevoked>(&event)) {
        client->FinishParameterRevoke(revoked->id);
      } else if (const auto* slabs = std::get_if<KvRevoked>(&event)) {
        const size_t count = std::min<size_t>(kv.size(), slabs->slabs);
        client->FinishKvRevoke(slabs->id, absl::MakeConstSpan(kv).last(count));
        kv.resize(kv.size() - count);
      } else if (std::holds_alternative<BrokerLost>(event)) {
        ++lost;
      } else if (const auto* rotation = std::get_if<RotationWanted>(&event)) {
        wanted.push_back(rotation->id);
        if (finishes) FinishRotations();
      } else if (std::holds_alternative<RotationSettled>(event)) {
        ++settled;
      }
    }
  }

  // A KV slab, or the workspace's first, on every GPU.
  std::vector<char*> At(RegionIndex index) const {
    std::vector<char*> pieces;
    for (int rank = 0; rank < client->ranks(); ++rank) {
      pieces.push_back(reinterpret_cast<char*>(client->kv(rank)) + index.value() * kSlabSize);
    }
    return pieces;
  }
  // Another value on each GPU.
  void Fill(RegionIndex index, int value) const {
    for (char* piece : At(index)) std::memset(piece, value++, kSlabSize);
  }
  bool Holds(RegionIndex index, int value) const {
    for (const char* piece : At(index)) {
      if (!AllBytesAre(piece, value++)) return false;
    }
    return true;
  }
  bool IsZero(RegionIndex index) const {
    for (const char* piece : At(index)) {
      if (!AllBytesAre(piece, 0)) return false;
    }
    return true;
  }
};

struct Setup {
  bool trusted = false;
  std::vector<int> gpus;
};

class CudaSessionTest : public ::testing::TestWithParam<Setup> {
 protected:
  CudaSessionTest() {
    FakeCuda::Reset();
    for (const int gpu : GetParam().gpus) {
      FakeCuda::SetMemory(gpu, kSlab * kPool + FakeCuda::InUse(gpu));
    }
    RegisterFakeKernels();
    StartBroker();
  }

  // Further lines: of the pool, of each tenant, of beta alone.
  absl::StatusOr<BrokerConfig> Config(const std::string& pool, const std::string& tenant,
                                      const std::string& beta) {
    const std::string yaml = absl::StrReplaceAll(
        node_.Config(kPool, "  min_residence: 10ms\n  residence_restores: 0\n",
                     "    workspace: 4 MiB\n    context: 0 MiB\n" + tenant),
        {{"- name: beta\n", absl::StrCat("- name: beta\n", beta)},
         {"pool:\n", absl::StrCat("pool:\n  backend: cuda\n  slab_bytes: 2 MiB\n  gpus: [",
                                  absl::StrJoin(GetParam().gpus, ", "), "]\n  trusted_workers: ",
                                  GetParam().trusted ? "true" : "false", "\n", pool)}});
    auto parsed = YamlConfig::Parse(yaml, "broker.yaml");
    if (!parsed.ok()) return parsed.status();
    return ReadBrokerConfig(*parsed, "");
  }
  void StartBroker(const std::string& pool = "", const std::string& tenant = "",
                   const std::string& beta = "") {
    auto config = Config(pool, tenant, beta);
    ASSERT_TRUE(config.ok()) << config.status();
    auto server = BrokerServer::Start(
        *config, [](const absl::Status& status) { FAIL() << "fatal: " << status; }, FakePool);
    ASSERT_TRUE(server.ok()) << server.status();
    server_ = *std::move(server);
  }

  void Connect(const std::string& name, Tenant& tenant) {
    auto memory = CudaMemory::Open({.driver = &FakeCudaDriver(), .gpus = GetParam().gpus});
    ASSERT_TRUE(memory.ok()) << memory.status();
    tenant.memory = *std::move(memory);
    GrpcMemoryClient::Options options;
    options.connection.address = "unix:" + node_.control();
    options.connection.descriptor_socket = node_.descriptors();
    options.connection.tenant = name;
    options.connection.secret = TestNode::Secret(name);
    options.backend = tenant.memory.get();
    options.metrics = &tenant.metrics;
    options.min_backoff = absl::Milliseconds(1);
    options.max_backoff = absl::Milliseconds(20);
    auto client = GrpcMemoryClient::Connect(std::move(options));
    ASSERT_TRUE(client.ok()) << client.status();
    tenant.client = *std::move(client);
  }

  void Activate(Tenant& tenant) {
    tenant.client->RequestActivation(ActivationReason::kRequest);
    ASSERT_TRUE(Eventually([&] {
      tenant.Take();
      return tenant.client->Mapped().parameters == tenant.client->Mapped().image;
    }));
  }

  void AwaitKv(Tenant& tenant, size_t slabs) {
    tenant.client->SetKvTarget(static_cast<int32_t>(slabs), static_cast<int32_t>(slabs));
    ASSERT_TRUE(Eventually([&] {
      tenant.Take();
      return tenant.kv.size() == slabs;
    }));
  }

  bool ParametersAreTheImages(Tenant& tenant) {
    const v1::ImageManifest& manifest = tenant.client->manifest();
    const int slabs = manifest.slab_checksums_size() / tenant.client->ranks();
    for (int i = 0; i < manifest.slab_checksums_size(); ++i) {
      const std::byte* slab = tenant.client->parameters(i / slabs) + i % slabs * kSlabSize;
      if (SlabChecksum({slab, kSlabSize}) != manifest.slab_checksums(i)) return false;
    }
    return true;
  }

  TestNode node_;
  std::unique_ptr<BrokerServer> server_;
};

}  // namespace palimpsest

#endif  // PALIMPSEST_WORKER_MEMORY_CUDA_CUDA_SESSION_FIXTURE_H_
