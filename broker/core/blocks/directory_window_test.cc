// Requests of models with a sliding window: only the end of a prefix is needed.
#include <vector>

#include "broker/core/blocks/block_directory.h"
#include "broker/core/blocks/block_directory_fixture.h"
#include "gtest/gtest.h"

namespace palimpsest::blocks {
namespace {

class WindowTest : public BlockDirectoryTest {
 protected:
  AcquireReply Ask(const std::vector<BlockIdentity>& path, size_t window, size_t held = 0,
                   absl::Duration wait = absl::ZeroDuration()) {
    AcquireRequest request = {.request = ++requests_, .ids = path};
    request.held = held;
    request.window = window;
    if (wait > absl::ZeroDuration()) request.deadline = now() + wait;
    const auto reply = directory().Acquire(kTwo, request, now());
    EXPECT_TRUE(reply.ok()) << reply.status();
    store_->Collect();
    return *reply;
  }
  void Hole(const BlockIdentity& id) {
    // What was never committed.
    ASSERT_TRUE(directory().Reserve(kOne, 0, {{id, kBlock}}, now()).ok());
  }

  uint64_t requests_ = 0;
};

TEST_F(WindowTest, OnlyTheWindowOfTheLongestPrefixIsPinned) {
  Start(2);
  ASSERT_EQ(Write(kOne, Path(1, 8)), 8);
  const AcquireReply reply = Ask(Path(1, 10), 3);
  EXPECT_EQ(reply.first, 5);
  ASSERT_EQ(reply.blocks.size(), 3);
  for (size_t i = 0; i < 3; ++i) EXPECT_EQ(reply.blocks[i].checksum, 106 + i);
  EXPECT_TRUE(reply.elsewhere.empty());
  EXPECT_EQ(Counters(kArenaTier).hits, 3);
}

TEST_F(WindowTest, WhatComesBeforeTheWindowNeedNotBeThere) {
  Start(2);
  Hole(Id(1, 1));
  const auto path = Path(1, 8);
  ASSERT_EQ(Write(kOne, {path.begin() + 1, path.end()}), 7);
  const AcquireReply reply = Ask(path, 3);
  EXPECT_EQ(reply.first, 5);
  EXPECT_EQ(reply.blocks.size(), 3);
  EXPECT_TRUE(Ask(path, 0).blocks.empty());
}

TEST_F(WindowTest, PrefixEndsBeforeAHoleInItsWindow) {
  Start(2);
  Hole(Id(1, 7));
  Write(kOne, Path(1, 6));
  Write(kOne, {Id(1, 8), Id(1, 9)});
  const AcquireReply reply = Ask(Path(1, 9), 3);
  EXPECT_EQ(reply.first, 3);
  EXPECT_EQ(reply.blocks.size(), 3);
  EXPECT_EQ(Ask(Path(1, 9), 2).first, 7) << "the two behind it are enough";
}

TEST_F(WindowTest, HeldBlocksArePartOfTheWindow) {
  Start(2);
  Write(kOne, Path(1, 6));
  const AcquireReply some = Ask(Path(1, 9), 4, 5);
  EXPECT_EQ(some.first, 5);
  ASSERT_EQ(some.blocks.size(), 1);
  EXPECT_EQ(some.blocks[0].checksum, 106);
  EXPECT_EQ(some.kept, 5);
  const AcquireReply all = Ask(Path(1, 9), 4, 6);
  EXPECT_EQ(all.first, 6);
  EXPECT_TRUE(all.blocks.empty());
}

TEST_F(WindowTest, TellsHowManyOfTheHeldBlocksAreKept) {
  Start(1);
  Write(kOne, Path(1, 3));
  EXPECT_EQ(Ask(Path(1, 6), 0, 5).kept, 3);
  PutBelow({Id(1, 4)});
  EXPECT_EQ(Ask(Path(1, 6), 0, 5).kept, 4);
  EXPECT_EQ(Ask(Path(1, 6), 0, 2).kept, 2);
}

TEST_F(WindowTest, OnlyTheWindowIsBroughtUp) {
  Start(2);
  Write(kOne, Path(1, 3));
  const auto path = Path(1, 9);
  PutBelow({path.begin() + 3, path.end()});
  const AcquireReply asked = Ask(path, 2);
  EXPECT_EQ(asked.first, 1);
  EXPECT_EQ(asked.blocks.size(), 2);
  ASSERT_EQ(asked.elsewhere.size(), 1);
  EXPECT_EQ(asked.elsewhere[0].tier, kNvme);
  EXPECT_EQ(asked.elsewhere[0].blocks, 6);
  const absl::Duration two = Serving().load.Expect(kBlock * 2);
  EXPECT_EQ(asked.elsewhere[0].expected, two) << "of the window alone";

  const auto wait = Ask(path, 2, 0, absl::Seconds(1)).wait;
  ASSERT_TRUE(wait.has_value());
  EXPECT_EQ(Pending<LoadBlock>(), 2);
  store_->PerformAll();
  const AcquireReply& reply = store_->answers[*wait];
  EXPECT_EQ(reply.first, 7);
  ASSERT_EQ(reply.blocks.size(), 2);
  EXPECT_EQ(reply.blocks[0].checksum, 108);
  EXPECT_EQ(Counters(kNvme).promotions_done, 2);
}

TEST_F(WindowTest, HalfAWindowIsGivenBackForAShorterPrefix) {
  Start(2);
  Write(kOne, Path(1, 3));
  const auto path = Path(1, 9);
  PutBelow({path.begin() + 3, path.end()});
  const auto wait = Ask(path, 2, 0, absl::Seconds(1)).wait;
  ASSERT_TRUE(wait.has_value());
  // The first of the two comes, the second does not.
  store_->Perform(0);
  store_->Perform(0, Fault::kFailed);
  store_->Collect();
  ASSERT_TRUE(store_->answers.contains(*wait));
  const AcquireReply& reply = store_->answers[*wait];
  EXPECT_EQ(reply.first, 1);
  ASSERT_EQ(reply.blocks.size(), 2);
  EXPECT_EQ(reply.blocks[0].checksum, 102);
  End(kTwo, requests_);
  EXPECT_EQ(directory().CheckConsistency(), absl::OkStatus());
}

}  // namespace
}  // namespace palimpsest::blocks
