// Workers behind a name, with a lookup that the test answers.
#include "router/server/worker_pool.h"

#include <gtest/gtest.h>

#include "router/server/testing/fake_worker.h"

namespace palimpsest::router {
namespace {

using testing::FakeWorker;

// Thread-safe.
class Names {
 public:
  void Set(std::vector<std::string> addresses) {
    MutexLock lock(&mutex_);
    answer_ = std::move(addresses);
  }
  void Fail() {
    MutexLock lock(&mutex_);
    answer_ = absl::UnavailableError("the name server is down");
    lookups_after_failing_ = 0;
  }
  int lookups_after_failing() {
    MutexLock lock(&mutex_);
    return lookups_after_failing_;
  }
  absl::StatusOr<std::vector<std::string>> LookUp() {
    MutexLock lock(&mutex_);
    ++lookups_after_failing_;
    return answer_;
  }

 private:
  Mutex mutex_;
  absl::StatusOr<std::vector<std::string>> answer_ ABSL_GUARDED_BY(mutex_) =
      std::vector<std::string>();
  int lookups_after_failing_ ABSL_GUARDED_BY(mutex_) = 0;
};

class WorkerPoolTest : public ::testing::Test {
 protected:
  WorkerPoolTest() {
    WorkerPoolOptions options;
    options.workers = {{"alpha", "m", "workers.test:9110"}};
    options.interval = absl::Milliseconds(5);
    options.timeout = absl::Seconds(10);
    options.resolve_interval = absl::Milliseconds(5);
    options.lookup = [names = names_](const HostPort& name) {
      EXPECT_EQ(name, (HostPort{"workers.test", "9110"}));
      return names->LookUp();
    };
    pool_ = std::make_unique<WorkerPool>(std::move(options), Clock::Real());
    pool_->Start();
  }

  size_t Healthy() const {
    size_t healthy = 0;
    for (const WorkerView& worker : pool_->List()) healthy += worker.healthy && !worker.draining;
    return healthy;
  }

  FakeWorker one_{"alpha", "m"};
  FakeWorker two_{"alpha", "m"};
  const std::shared_ptr<Names> names_ = std::make_shared<Names>();
  std::unique_ptr<WorkerPool> pool_;
};

TEST_F(WorkerPoolTest, EveryAddressOfANameIsAWorkerOfItsOwn) {
  names_->Set({one_.address(), two_.address()});
  ASSERT_TRUE(Eventually([&] { return Healthy() == 2; }));
  const WorkerId first = pool_->Choose("alpha", "m", {}, {}).value();
  const WorkerId second = pool_->Choose("alpha", "m", {}, {}).value();
  EXPECT_NE(first, second);
  pool_->Finished(first);
  pool_->Finished(second);
}

TEST_F(WorkerPoolTest, AddressesThatComeAndGoAreFollowed) {
  names_->Set({one_.address()});
  ASSERT_TRUE(Eventually([&] { return Healthy() == 1; }));
  const WorkerId old = pool_->Choose("alpha", "m", {}, {}).value();
  names_->Set({two_.address()});
  ASSERT_TRUE(Eventually([&] { return pool_->List().size() == 2 && Healthy() == 1; }));
  const WorkerId fresh = pool_->Choose("alpha", "m", {}, {}).value();
  EXPECT_NE(fresh, old);
  EXPECT_NE(pool_->stub(old), nullptr) << "its request goes on";
  pool_->Finished(old);
  pool_->Finished(fresh);
  EXPECT_TRUE(Eventually([&] { return pool_->List().size() == 1; }));
  names_->Set({});
  EXPECT_TRUE(Eventually([&] { return pool_->List().empty(); }));
}

TEST_F(WorkerPoolTest, APollThatIsCutOffIsRepeatedBeforeTheWorkerCountsAsLost) {
  names_->Set({one_.address()});
  ASSERT_TRUE(Eventually([&] { return Healthy() == 1; }));
  one_.CancelEverySecondPoll();
  const int before = one_.polls();
  bool always = true;
  EXPECT_TRUE(Eventually([&] {
    always = always && Healthy() == 1;
    return one_.polls() > before + 40;
  }));
  EXPECT_TRUE(always);
  one_.Stop();
  EXPECT_TRUE(Eventually([&] { return Healthy() == 0; }));
}

TEST_F(WorkerPoolTest, ANameServerThatFailsTakesNoWorkerAway) {
  names_->Set({one_.address(), two_.address()});
  ASSERT_TRUE(Eventually([&] { return Healthy() == 2; }));
  names_->Fail();
  ASSERT_TRUE(Eventually([&] { return names_->lookups_after_failing() > 3; }));
  EXPECT_EQ(Healthy(), 2);
}

}  // namespace
}  // namespace palimpsest::router
