// A GrpcMemoryClient on a broker that says what a test wants.
#ifndef PALIMPSEST_WORKER_MEMORY_GRPC_MEMORY_CLIENT_FIXTURE_H_
#define PALIMPSEST_WORKER_MEMORY_GRPC_MEMORY_CLIENT_FIXTURE_H_

#include <cstdlib>
#include <cstring>
#include <deque>
#include <filesystem>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <variant>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/strings/str_cat.h"
#include "common/monotonic_time.h"
#include "common/mutex.h"
#include "gtest/gtest.h"
#include "worker/memory/grpc_memory_client.h"
#include "worker/memory/testing/fake_broker.h"

namespace palimpsest {

class GrpcMemoryClientTest : public ::testing::Test {
 protected:
  using Case = v1::WorkerMessage::MessageCase;
  static constexpr absl::Duration kPatience = absl::Seconds(20);
  static constexpr size_t kSlabBytes = FakeBroker::kSlab.count();

  GrpcMemoryClientTest() : folder_(MakeFolder()), broker_(folder_) {}
  explicit GrpcMemoryClientTest(const FakeBroker::Model& model)
      : folder_(MakeFolder()), broker_(folder_, model) {}
  ~GrpcMemoryClientTest() override {
    client_ = nullptr;
    broker_.Kill();
    std::filesystem::remove_all(folder_);
  }

  static std::string MakeFolder() {
    char name[] = "/tmp/memory_client_test.XXXXXX";
    return ::mkdtemp(name);
  }

  static std::vector<RegionIndex> Indexes(const std::vector<uint32_t>& values) {
    std::vector<RegionIndex> indexes;
    for (const uint32_t value : values) indexes.push_back(RegionIndex(value));
    return indexes;
  }

  GrpcMemoryClient::Options ClientOptions() {
    GrpcMemoryClient::Options options;
    options.connection.address = broker_.address();
    options.connection.descriptor_socket = broker_.descriptor_socket();
    options.connection.tenant = "alpha";
    options.connection.secret = "hush";
    options.connection.on_progress = [this](const v1::ImageProgress& progress) {
      progress_ += progress.phase();
      std::function<void()> act;
      {
        MutexLock lock(&mu_);
        act = std::exchange(while_attaching_, nullptr);
      }
      if (act) act();
    };
    options.connect_timeout = kPatience;
    options.min_backoff = absl::Milliseconds(1);
    options.max_backoff = absl::Milliseconds(20);
    options.gate_patience = kPatience;
    options.give_back_part = give_back_part_;
    options.on_fatal = [this](const absl::Status& status) {
      MutexLock lock(&mu_);
      fatal_ = status;
      changed_.SignalAll();
    };
    return options;
  }

  absl::Status TryConnect() {
    absl::StatusOr<std::unique_ptr<GrpcMemoryClient>> client =
        GrpcMemoryClient::Connect(ClientOptions());
    if (!client.ok()) return client.status();
    client_ = *std::move(client);
    client_->SetWakeup([this] {
      MutexLock lock(&mu_);
      woken_ = true;
      changed_.SignalAll();
    });
    return absl::OkStatus();
  }

  // `act` runs once, while the client attaches to the next broker.
  void WhileAttaching(std::function<void()> act) {
    MutexLock lock(&mu_);
    while_attaching_ = std::move(act);
  }

  void Connect() {
    broker_.Start();
    const absl::Status status = TryConnect();
    ASSERT_TRUE(status.ok()) << status;
    broker_.AwaitAttached(1);
  }

  // Waits for the next event of type T; events before it are dropped, as is proper for an engine
  // that only cares for this one.
  template <typename T>
  T AwaitEvent() {
    const absl::Time deadline = MonotonicNow() + kPatience;
    for (;;) {
      for (MemoryEvent& event : client_->TakeEvents()) events_.push_back(std::move(event));
      while (!events_.empty()) {
        MemoryEvent event = std::move(events_.front());
        events_.pop_front();
        if (T* wanted = std::get_if<T>(&event)) return std::move(*wanted);
      }
      MutexLock lock(&mu_);
      while (!woken_) {
        if (changed_.WaitWithDeadline(&mu_, deadline) && !woken_) {
          ADD_FAILURE() << "timeout: no such event";
          return {};
        }
      }
      woken_ = false;
    }
  }

  absl::Status AwaitFatal() {
    const absl::Time deadline = MonotonicNow() + kPatience;
    MutexLock lock(&mu_);
    while (fatal_.ok()) {
      if (changed_.WaitWithDeadline(&mu_, deadline)) break;
    }
    return fatal_;
  }

  absl::Status AwaitAllStages() {
    for (int stage = 0; stage < 3; ++stage) {
      if (absl::Status status = client_->gate().AwaitStage(stage); !status.ok()) return status;
    }
    return absl::OkStatus();
  }

  void AwaitRestored(int32_t slabs) {
    const absl::Time deadline = MonotonicNow() + kPatience;
    while (client_->Mapped().parameters < slabs) {
      ASSERT_LT(MonotonicNow(), deadline);
      std::this_thread::yield();
    }
  }

  bool SlabIsRestored(uint32_t slab) {
    const std::string image = broker_.ImageSlab(slab);
    return std::memcmp(client_->parameters() + slab * kSlabBytes, image.data(), kSlabBytes) == 0;
  }

  // Activates everything: slabs 0 .. 3 of the pool at places 0 .. 3.
  void Activate() {
    client_->RequestActivation(ActivationReason::kRequest);
    broker_.Await(Case::kActivate);
    broker_.Grant(v1::SLAB_ROLE_PARAMETER, {0, 1, 2, 3}, {0, 1, 2, 3});
    AwaitEvent<ParametersComing>();
    const absl::Status status = AwaitAllStages();
    ASSERT_TRUE(status.ok()) << status;
    broker_.Await(Case::kGrantMapped);
  }

  std::vector<RegionIndex> GrantKv(const std::vector<uint32_t>& slabs) {
    broker_.Grant(v1::SLAB_ROLE_KV, slabs);
    std::vector<RegionIndex> indexes = AwaitEvent<KvMapped>().indexes;
    broker_.Await(Case::kGrantMapped);
    return indexes;
  }

  // "kv2=12": slab 12 at place 2.
  std::vector<std::string> HeldAtAttach() {
    std::vector<std::string> held;
    const v1::Attach attach = broker_.last_attach();
    for (const v1::HeldSlab& slab : attach.reattach().slabs()) {
      EXPECT_GT(slab.epoch(), 0);
      held.push_back(absl::StrCat(slab.role() == v1::SLAB_ROLE_KV ? "kv" : "p", slab.region_index(),
                                  "=", slab.slab_id()));
    }
    return held;
  }

  Bytes give_back_part_ = MiB(256);
  const std::string folder_;
  FakeBroker broker_;
  std::string progress_;

 private:
  std::deque<MemoryEvent> events_;
  Mutex mu_;
  CondVar changed_;
  bool woken_ ABSL_GUARDED_BY(mu_) = false;
  std::function<void()> while_attaching_ ABSL_GUARDED_BY(mu_);
  absl::Status fatal_ ABSL_GUARDED_BY(mu_);

 protected:
  std::unique_ptr<GrpcMemoryClient> client_;  // calls back: ends before what is above
};

}  // namespace palimpsest

#endif  // PALIMPSEST_WORKER_MEMORY_GRPC_MEMORY_CLIENT_FIXTURE_H_
