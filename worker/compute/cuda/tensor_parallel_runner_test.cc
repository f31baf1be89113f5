#include "worker/compute/cuda/tensor_parallel_runner.h"

#include <algorithm>
#include <deque>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "common/mutex.h"
#include "gtest/gtest.h"

namespace palimpsest::cuda {
namespace {

constexpr int kRanks = 3;
constexpr int kStages = 4;

// GPUs that wait for each other: a rank's step ends when all ranks have started theirs.
class FakeGpus : public CollectiveGroup {
 public:
  explicit FakeGpus(RankMeeting* meeting) : meeting_(meeting), started_(kRanks) {
    for (int rank = 0; rank < kRanks; ++rank)
      members_.push_back(std::make_unique<Member>(this, rank));
  }

  int ranks() const override { return kRanks; }
  Collective& rank(int rank) override { return *members_[rank]; }

  void Start(int rank) {
    MutexLock lock(&mutex_);
    ++started_[rank];
    changed_.SignalAll();
  }
  // Blocks until all ranks have started `step` steps, or one has given up.
  void AwaitAll(int step) {
    MutexLock lock(&mutex_);
    while (!ended_ && *std::min_element(started_.begin(), started_.end()) < step) {
      changed_.Wait(&mutex_);
    }
  }

 private:
  class Member : public Collective {
   public:
    Member(FakeGpus* gpus, int rank) : gpus_(gpus), rank_(rank) {}
    int rank() const override { return rank_; }
    int ranks() const override { return kRanks; }
    absl::Status AllReduce(void*, int64_t, cudaStream_t) override { return absl::OkStatus(); }
    absl::Status AllReduceBeside(void*, int64_t, cudaStream_t) override { return absl::OkStatus(); }
    bool JoinsNorm(int32_t, int32_t) const override { return false; }
    absl::Status AllReduceNorm(void*, const SummedNorm&, cudaStream_t) override {
      return absl::OkStatus();
    }
    absl::Status Join(cudaStream_t) override { return absl::OkStatus(); }
    absl::Status AllGather(float*, float*, int32_t, int32_t, int32_t, cudaStream_t) override {
      return absl::OkStatus();
    }
    void Abort(const absl::Status& status) override {
      gpus_->meeting_->Abort(status);
      MutexLock lock(&gpus_->mutex_);
      gpus_->ended_ = true;
      gpus_->changed_.SignalAll();
    }
    absl::Status status() const override { return gpus_->meeting_->aborted(); }

   private:
    FakeGpus* const gpus_;
    const int rank_;
  };

  RankMeeting* const meeting_;
  std::vector<std::unique_ptr<Member>> members_;
  Mutex mutex_;
  CondVar changed_;
  std::vector<int> started_ ABSL_GUARDED_BY(mutex_);
  bool ended_ ABSL_GUARDED_BY(mutex_) = false;
};

// What goes wrong, by rank and step (from 1); each is asked on the rank's thread.
struct Faults {
  std::function<absl::Status(int rank, int step)> launch = [](int, int) {
    return absl::OkStatus();
  };
  std::function<absl::Status(int rank, int step)> gpu = [](int, int) { return absl::OkStatus(); };
  std::function<absl::Status(int rank)> rotate = [](int) { return absl::OkStatus(); };
  std::function<TokenId(int rank, int step)> token = [](int, int step) { return step; };
};

// A rank's runner as the real one behaves: what fails is reported by Wait, and told to the others
// unless all failed alike.
class FakeRankRunner : public ModelRunner {
 public:
  FakeRankRunner(FakeGpus* gpus, Collective* collective, ParameterGate* gate, const Faults* faults)
      : gpus_(gpus), collective_(collective), gate_(gate), faults_(faults) {}
  ~FakeRankRunner() override {
    while (!flights_.empty()) Wait().IgnoreError();
  }

  int pipeline_depth() const override { return kMaxPipelineDepth; }

  absl::Status Submit(const StepPlan& plan) override {
    if (plan.chunks.empty()) return absl::InvalidArgumentError("a plan without chunks");
    ++step_;
    absl::Status status = collective_->status();
    bool refused = false;
    for (int stage = 0; status.ok() && stage < kStages; ++stage) {
      void* event = nullptr;
      if (gate_ != nullptr) status = gate_->StageEvents(stage, absl::MakeSpan(&event, 1));
      refused = !status.ok();
      if (status.ok() && stage == 1) status = faults_->launch(collective_->rank(), step_);
    }
    if (!status.ok() && !refused) collective_->Abort(status);
    // Whatever was enqueued before a refusal is there on all ranks.
    gpus_->Start(collective_->rank());
    flights_.push_back({step_, status, plan.chunks.size()});
    return absl::OkStatus();
  }

  absl::StatusOr<StepResult> Wait() override {
    const Flight flight = flights_.front();
    flights_.pop_front();
    const int rank = collective_->rank();
    absl::Status status = faults_->gpu(rank, flight.step);
    if (!status.ok()) collective_->Abort(status);
    gpus_->AwaitAll(flight.step);
    if (!flight.status.ok()) return flight.status;
    if (!status.ok()) return status;
    StepResult result;
    result.sampled.resize(flight.chunks);
    for (auto& sampled : result.sampled)
      sampled.emplace().token = faults_->token(rank, flight.step);
    return result;
  }

  absl::Status SetRotation(const Rotation&) override {
    return faults_->rotate(collective_->rank());
  }

 private:
  struct Flight {
    int step;
    absl::Status status;
    size_t chunks;
  };

  FakeGpus* const gpus_;
  Collective* const collective_;
  ParameterGate* const gate_;
  const Faults* const faults_;
  int step_ = 0;
  std::deque<Flight> flights_;
};

class FakeGate : public ParameterGate {
 public:
  absl::Status AwaitStage(int) override {
    ++asked;
    if (--until_closed == 0) return absl::UnavailableError("no parameters");
    return absl::OkStatus();
  }
  absl::Status CheckPassed() override {
    ++checked;
    return passed;
  }

  int asked = 0;
  int checked = 0;
  int until_closed = 0;  // questions
  absl::Status passed;
};

class TensorParallelRunnerTest : public testing::Test {
 protected:
  absl::Status Make(std::function<absl::Status(int rank)> start = nullptr) {
    auto meeting = std::make_unique<RankMeeting>(kRanks);
    auto gpus = std::make_unique<FakeGpus>(meeting.get());
    FakeGpus* const shared = gpus.get();
    auto made = TensorParallelRunner::Create(
        std::move(meeting), std::move(gpus), &gate_,
        [&](Collective& collective,
            ParameterGate* gate) -> absl::StatusOr<std::unique_ptr<ModelRunner>> {
          if (start) {
            if (absl::Status status = start(collective.rank()); !status.ok()) return status;
            shared->AwaitAll(1);
          }
          return std::make_unique<FakeRankRunner>(shared, &collective, gate, &faults_);
        });
    if (!made.ok()) return made.status();
    runner_ = *std::move(made);
    return absl::OkStatus();
  }

  absl::Status Submit(size_t chunks = 1) {
    StepPlan plan;
    plan.chunks.resize(chunks);
    return runner_->Submit(plan);
  }
  TokenId WaitForToken() {
    const absl::StatusOr<StepResult> result = runner_->Wait();
    EXPECT_TRUE(result.ok()) << result.status();
    return result.ok() ? result->sampled.front()->token : -1;
  }

  Faults faults_;
  FakeGate gate_;
  std::unique_ptr<TensorParallelRunner> runner_;
};

TEST_F(TensorParallelRunnerTest, TwoStepsAreInFlightOnAllRanks) {
  ASSERT_TRUE(Make().ok());
  EXPECT_EQ(runner_->pipeline_depth(), 2);
  ASSERT_TRUE(Submit().ok());
  for (int step = 1; step < 200; ++step) {
    ASSERT_TRUE(Submit(1 + step % 3).ok());
    ASSERT_EQ(WaitForToken(), step);
  }
  EXPECT_EQ(WaitForToken(), 200);
  EXPECT_EQ(gate_.asked, 200 * kStages);
  EXPECT_EQ(gate_.checked, 200);
}

TEST_F(TensorParallelRunnerTest, APlanThatAllRefuseHarmsNothing) {
  ASSERT_TRUE(Make().ok());
  ASSERT_TRUE(Submit().ok());
  EXPECT_EQ(Submit(0).code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(WaitForToken(), 1);
  ASSERT_TRUE(Submit().ok());
  EXPECT_EQ(WaitForToken(), 2);
}

TEST_F(TensorParallelRunnerTest, AClosedGateFailsTheStepOnAllRanksAndTheNextOneRuns) {
  ASSERT_TRUE(Make().ok());
  gate_.until_closed = 3;
  ASSERT_TRUE(Submit().ok());
  EXPECT_EQ(runner_->Wait().status(), absl::UnavailableError("no parameters"));
  EXPECT_EQ(gate_.asked, 3);
  ASSERT_TRUE(Submit().ok());
  EXPECT_EQ(WaitForToken(), 2);
}

TEST_F(TensorParallelRunnerTest, AnErrorOfOneGpuEndsTheStepOfAllForGood) {
  for (int rank = 0; rank < kRanks; ++rank) {
    const absl::Status error = absl::InternalError("illegal access");
    faults_ = Faults();
    ASSERT_TRUE(Make().ok());
    faults_.gpu = [&](int r, int step) {
      return r == rank && step == 2 ? error : absl::OkStatus();
    };
    ASSERT_TRUE(Submit().ok());
    ASSERT_TRUE(Submit().ok());
    EXPECT_EQ(WaitForToken(), 1);
    ASSERT_TRUE(Submit().ok());
    EXPECT_EQ(runner_->Wait().status(), error);
    EXPECT_EQ(runner_->Wait().status(), error);
    ASSERT_TRUE(Submit().ok());
    EXPECT_EQ(runner_->Wait().status(), error);
  }
}

TEST_F(TensorParallelRunnerTest, ARankThatCannotLaunchKeepsNoneWaiting) {
  const absl::Status error = absl::InternalError("cannot launch");
  ASSERT_TRUE(Make().ok());
  faults_.launch = [&](int rank, int step) {
    return rank == 1 && step == 2 ? error : absl::OkStatus();
  };
  ASSERT_TRUE(Submit().ok());
  ASSERT_TRUE(Submit().ok());
  // The first step ended well on all GPUs, but what the abort left of it is not to be trusted.
  EXPECT_EQ(runner_->Wait().status(), error);
  EXPECT_EQ(runner_->Wait().status(), error);
}

TEST_F(TensorParallelRunnerTest, ARankThatCannotBeMadeEndsTheCreationOfAll) {
  const absl::Status error = absl::NotFoundError("no such GPU");
  EXPECT_EQ(Make([&](int rank) { return rank == 2 ? error : absl::OkStatus(); }), error);
}

TEST_F(TensorParallelRunnerTest, RanksThatSampleDifferentTokensAreFound) {
  ASSERT_TRUE(Make().ok());
  faults_.token = [](int rank, int step) { return rank == 2 && step == 2 ? 7 : step; };
  ASSERT_TRUE(Submit().ok());
  EXPECT_EQ(WaitForToken(), 1);
  ASSERT_TRUE(Submit().ok());
  EXPECT_EQ(runner_->Wait().status().code(), absl::StatusCode::kInternal);
}

TEST_F(TensorParallelRunnerTest, DamagedParametersFailTheStep) {
  ASSERT_TRUE(Make().ok());
  gate_.passed = absl::DataLossError("checksum");
  ASSERT_TRUE(Submit().ok());
  EXPECT_EQ(runner_->Wait().status(), gate_.passed);
}

TEST_F(TensorParallelRunnerTest, LayersRotateOnAllRanksOrTheRunnerEnds) {
  const absl::Status refusal = absl::FailedPreconditionError("no image");
  ASSERT_TRUE(Make().ok());
  const Rotation rotation{.stages = {1, 2}, .slots = 1};
  EXPECT_TRUE(runner_->SetRotation(rotation).ok());
  faults_.rotate = [&](int) { return refusal; };
  EXPECT_EQ(runner_->SetRotation(rotation), refusal);
  ASSERT_TRUE(Submit().ok());
  EXPECT_EQ(WaitForToken(), 1);
  faults_.rotate = [&](int rank) { return rank == 1 ? refusal : absl::OkStatus(); };
  EXPECT_EQ(runner_->SetRotation(rotation).code(), absl::StatusCode::kInternal);
  ASSERT_TRUE(Submit().ok());
  EXPECT_EQ(runner_->Wait().status().code(), absl::StatusCode::kInternal);
}

TEST_F(TensorParallelRunnerTest, StepsInFlightEndBeforeTheRunnerDoes) {
  ASSERT_TRUE(Make().ok());
  ASSERT_TRUE(Submit().ok());
  ASSERT_TRUE(Submit().ok());
  runner_.reset();
}

}  // namespace
}  // namespace palimpsest::cuda
