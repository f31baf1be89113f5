#include <fcntl.h>

#include "absl/container/flat_hash_set.h"
#include "common/clock.h"
#include "common/fd.h"
#include "common/random.h"
#include "common/running_clock.h"
#include "gtest/gtest.h"

namespace palimpsest {
namespace {

bool IsOpen(int fd) { return ::fcntl(fd, F_GETFD) >= 0; }

UniqueFd OpenNull() { return UniqueFd(::open("/dev/null", O_RDWR | O_CLOEXEC)); }

TEST(UniqueFd, DestructionClosesExactlyOnce) {
  int number;
  {
    UniqueFd first = OpenNull();
    number = first.get();
    UniqueFd second = std::move(first);
    EXPECT_FALSE(first.valid());  // NOLINT(bugprone-use-after-move): a promise of the class
    EXPECT_EQ(second.get(), number);
    EXPECT_TRUE(IsOpen(number));
  }
  EXPECT_FALSE(IsOpen(number));
}

TEST(UniqueFd, MoveAssignmentClosesTheOldOne) {
  UniqueFd kept = OpenNull();
  UniqueFd replaced = OpenNull();
  const int old = replaced.get();
  replaced = std::move(kept);
  EXPECT_FALSE(IsOpen(old));
  EXPECT_TRUE(IsOpen(replaced.get()));
}

TEST(UniqueFd, DuplicateOutlivesTheOriginalAndIsNotInherited) {
  UniqueFd original = OpenNull();
  absl::StatusOr<UniqueFd> copy = original.Duplicate();
  ASSERT_TRUE(copy.ok()) << copy.status();
  original.Reset();
  EXPECT_TRUE(IsOpen(copy->get()));
  EXPECT_EQ(::fcntl(copy->get(), F_GETFD) & FD_CLOEXEC, FD_CLOEXEC);
}

TEST(UniqueFd, DuplicateOfNothingFails) { EXPECT_FALSE(UniqueFd().Duplicate().ok()); }

TEST(RunningClock, StandsStillWhileTheProcessDoes) {
  FakeClock base;
  const RunningClock clock(base, absl::Seconds(1));
  const absl::Time start = clock.Now();
  EXPECT_EQ(start, base.Now());
  for (int i = 0; i < 10; ++i) {
    base.Advance(absl::Milliseconds(500));
    EXPECT_EQ(clock.Now(), start + absl::Milliseconds(500) * (i + 1));
  }
  base.Advance(absl::Hours(3));
  EXPECT_EQ(clock.Now(), start + absl::Seconds(5));
  EXPECT_EQ(clock.stopped(), absl::Hours(3));
  base.Advance(absl::Seconds(1));
  EXPECT_EQ(clock.Now(), start + absl::Seconds(6));
  EXPECT_EQ(clock.stopped(), absl::Hours(3));
}

TEST(Clock, RealTimeNeverGoesBack) {
  absl::Time last = Clock::Real().Now();
  for (int i = 0; i < 1000; ++i) {
    const absl::Time now = Clock::Real().Now();
    ASSERT_GE(now, last);
    last = now;
  }
}

TEST(Clock, FakeTimeMovesOnlyWhenTold) {
  FakeClock clock;
  const absl::Time start = clock.Now();
  EXPECT_EQ(clock.Now(), start);
  clock.Advance(absl::Seconds(3));
  EXPECT_EQ(clock.Now() - start, absl::Seconds(3));
}

TEST(Token, RandomOnesDiffer) {
  absl::flat_hash_set<Token> seen;
  for (int i = 0; i < 1000; ++i) seen.insert(Token::Random());
  EXPECT_EQ(seen.size(), 1000);
  EXPECT_FALSE(seen.contains(Token()));
}

TEST(Token, BytesRoundTripAndWrongLengthsAreNothing) {
  const Token token = Token::Random();
  EXPECT_EQ(Token::FromBytes(token.bytes()), token);
  EXPECT_EQ(Token::FromBytes(token.bytes().substr(1)), std::nullopt);
  EXPECT_EQ(Token::FromBytes(token.ToBytes() + "x"), std::nullopt);
  EXPECT_EQ(Token::FromBytes(""), std::nullopt);
}

TEST(ConstantTimeEqual, ComparesLikeEquality) {
  EXPECT_TRUE(ConstantTimeEqual("", ""));
  EXPECT_TRUE(ConstantTimeEqual("secret", "secret"));
  EXPECT_FALSE(ConstantTimeEqual("secret", "Secret"));
  EXPECT_FALSE(ConstantTimeEqual("secret", "secreT"));
  EXPECT_FALSE(ConstantTimeEqual("secret", "secrets"));
  EXPECT_FALSE(ConstantTimeEqual("secret", ""));
}

}  // namespace
}  // namespace palimpsest
