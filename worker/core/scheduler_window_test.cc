// The block store of a model with a sliding window: what is loaded, and stored, of a prefix.
#include <utility>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "worker/core/scheduler_store_fixture.h"

namespace palimpsest {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

// A token sees 8 before it: two blocks.
class WindowSchedulerStoreTest : public SchedulerStoreTest {
 protected:
  explicit WindowSchedulerStoreTest(int32_t blocks = 20)
      : SchedulerStoreTest(blocks, ChainKey, /*window=*/9) {}

  void Run() {
    for (int i = 0; i < 200 && !scheduler_.idle(); ++i) {
      Step();
      Settle();
    }
    EXPECT_TRUE(scheduler_.idle());
  }
  void Remember(std::vector<TokenId> prompt) {
    Add(std::move(prompt));
    Run();
    Clear();
  }
};

TEST_F(WindowSchedulerStoreTest, OnlyWhatTheNextTokenSeesIsLoaded) {
  Remember(Tokens(30));
  EXPECT_EQ(scheduler_.offload_counters().stored, 7);
  Add(Tokens(34));
  Ask();
  EXPECT_THAT(Step(), IsEmpty()) << "it is loaded";
  Settle();
  EXPECT_THAT(Step(), ElementsAre(28));
  EXPECT_EQ(scheduler_.counters().blocks_loaded, 2);
  EXPECT_EQ(scheduler_.TakeOutputs().back().usage.cached_tokens, 28);
  Settle();
  EXPECT_EQ(store_.held(), 0u);
  EXPECT_EQ(store_.blocks(), 8u) << "what comes behind is stored";
  // It is in T0 for others.
  Add(Tokens(34));
  EXPECT_THAT(Step(), ElementsAre(32));
}

TEST_F(WindowSchedulerStoreTest, LoadsBehindWhatT0Has) {
  Remember(Tokens(30));
  Add(Tokens(22));  // T0 has the blocks up to 20 tokens
  Run();
  const int64_t before = scheduler_.counters().blocks_loaded;
  Add(Tokens(26));  // one more
  Ask();
  Step();
  Settle();
  EXPECT_THAT(Step(), ElementsAre(24));
  EXPECT_EQ(scheduler_.counters().blocks_loaded - before, 1);
}

TEST_F(WindowSchedulerStoreTest, CorruptedWindowIsComputedFromTheBeginning) {
  Remember(Tokens(30));
  store_.Corrupt();
  Add(Tokens(34));
  Ask();
  Step();
  Settle();
  EXPECT_THAT(Step(), ElementsAre(0));
  Run();
  EXPECT_EQ(scheduler_.TakeOutputs().back().usage.cached_tokens, 0);
}

class SmallWindowSchedulerStoreTest : public WindowSchedulerStoreTest {
 protected:
  SmallWindowSchedulerStoreTest() : WindowSchedulerStoreTest(/*blocks=*/8) {}
};

TEST_F(SmallWindowSchedulerStoreTest, BlocksAreStoredBeforeTheyLeaveTheWindow) {
  Add(Tokens(60));
  Run();
  EXPECT_EQ(scheduler_.offload_counters().stored, 15);
  EXPECT_EQ(scheduler_.offload_counters().dropped, 0);
}

}  // namespace
}  // namespace palimpsest
