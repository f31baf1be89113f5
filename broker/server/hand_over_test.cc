#include "broker/server/hand_over.h"

#include <unistd.h>

#include "gtest/gtest.h"

namespace palimpsest {
namespace {

constexpr ConnectionId kAlpha(1);
constexpr ConnectionId kBeta(2);

class HandOverTableTest : public ::testing::Test {
 protected:
  static HandOver Slab(uint32_t id) {
    return HandOver{DescriptorKind::kSlabs,
                    {SlabEntry{SlabId(id), Epoch(1)}},
                    {std::make_shared<const UniqueFd>(dup(0))}};
  }

  void SetUp() override {
    table_.Open(kAlpha);
    table_.Open(kBeta);
  }

  FakeClock clock_;
  HandOverTable table_{clock_, 3};
};

TEST_F(HandOverTableTest, GivesWhatWasOfferedOnce) {
  const Token token = table_.Offer(kAlpha, Slab(7), absl::Seconds(10));
  const auto taken = table_.Take(kAlpha, token);
  ASSERT_TRUE(taken.ok()) << taken.status();
  EXPECT_EQ(taken->entries[0].slab_id, SlabId(7));
  EXPECT_EQ(table_.Take(kAlpha, token).status().code(), absl::StatusCode::kNotFound);
}

TEST_F(HandOverTableTest, KnowsNoTokenOfAnotherConnection) {
  const Token token = table_.Offer(kAlpha, Slab(7), absl::Seconds(10));
  EXPECT_EQ(table_.Take(kBeta, token).status().code(), absl::StatusCode::kNotFound);
  EXPECT_TRUE(table_.Take(kAlpha, token).ok()) << "a stranger's try does not use it up";
}

TEST_F(HandOverTableTest, ATokenExpires) {
  const Token token = table_.Offer(kAlpha, Slab(7), absl::Seconds(10));
  clock_.Advance(absl::Seconds(10));
  EXPECT_EQ(table_.Take(kAlpha, token).status().code(), absl::StatusCode::kDeadlineExceeded);
  EXPECT_EQ(table_.size(), 0);
}

TEST_F(HandOverTableTest, AnAllZeroTokenTakesNothing) {
  table_.Offer(kAlpha, Slab(7), absl::Seconds(10));
  EXPECT_FALSE(table_.Take(kAlpha, Token()).ok());
}

TEST_F(HandOverTableTest, IsBoundedForEachConnection) {
  const Token first = table_.Offer(kAlpha, Slab(0), absl::Seconds(10));
  const Token other = table_.Offer(kBeta, Slab(9), absl::Seconds(10));
  for (uint32_t i = 1; i <= 3; ++i) table_.Offer(kAlpha, Slab(i), absl::Seconds(10));
  EXPECT_EQ(table_.size(), 4);
  EXPECT_FALSE(table_.Take(kAlpha, first).ok());
  EXPECT_TRUE(table_.Take(kBeta, other).ok());
}

TEST_F(HandOverTableTest, DropClosesTheDescriptors) {
  HandOver what = Slab(7);
  const std::weak_ptr<const UniqueFd> memory = what.descriptors[0];
  const Token token = table_.Offer(kAlpha, std::move(what), absl::Seconds(10));
  table_.Drop(kAlpha);
  EXPECT_TRUE(memory.expired());
  EXPECT_FALSE(table_.Take(kAlpha, token).ok());
}

TEST_F(HandOverTableTest, NothingWaitsForAConnectionThatIsClosed) {
  table_.Drop(kAlpha);
  HandOver what = Slab(7);
  const std::weak_ptr<const UniqueFd> memory = what.descriptors[0];
  const Token token = table_.Offer(kAlpha, std::move(what), absl::Seconds(10));
  EXPECT_TRUE(memory.expired());
  EXPECT_EQ(table_.size(), 0);
  EXPECT_FALSE(table_.Take(kAlpha, token).ok());
}

}  // namespace
}  // namespace palimpsest
