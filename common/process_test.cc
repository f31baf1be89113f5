#include "common/process.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace palimpsest {
namespace {

using ::testing::HasSubstr;

struct Pipe {
  Pipe() {
    int ends[2];
    EXPECT_EQ(::pipe2(ends, O_CLOEXEC), 0);
    read = UniqueFd(ends[0]);
    write = UniqueFd(ends[1]);
  }
  // Everything until the last writer closed.
  std::string Drain() {
    write.Reset();
    std::string text;
    std::array<char, 256> buffer;
    ssize_t got;
    while ((got = ::read(read.get(), buffer.data(), buffer.size())) > 0) {
      text.append(buffer.data(), static_cast<size_t>(got));
    }
    return text;
  }
  UniqueFd read, write;
};

absl::StatusOr<ChildProcess> Shell(const std::string& script, std::vector<int> descriptors = {},
                                   int output = -1) {
  return ChildProcess::Spawn({.argv = {"/bin/sh", "-c", script},
                              .environment = {"NAME=value"},
                              .descriptors = std::move(descriptors),
                              .output = output});
}

constexpr absl::Duration kLong = absl::Seconds(30);

TEST(ProcessStartTicks, OwnProcessHasOneAndItIsStable) {
  absl::StatusOr<uint64_t> ticks = ProcessStartTicks(::getpid());
  ASSERT_TRUE(ticks.ok()) << ticks.status();
  EXPECT_GT(*ticks, 0);
  EXPECT_EQ(*ProcessStartTicks(::getpid()), *ticks);
}

TEST(ProcessStartTicks, NameWithParenthesesAndSpacesDoesNotConfuse) {
  const uint64_t expected = *ProcessStartTicks(::getpid());
  std::array<char, 16> name = {};
  ASSERT_EQ(::prctl(PR_GET_NAME, name.data()), 0);
  ASSERT_EQ(::prctl(PR_SET_NAME, "x) R 1 2 ("), 0);
  absl::StatusOr<uint64_t> ticks = ProcessStartTicks(::getpid());
  ASSERT_EQ(::prctl(PR_SET_NAME, name.data()), 0);
  ASSERT_TRUE(ticks.ok()) << ticks.status();
  EXPECT_EQ(*ticks, expected);
}

TEST(ProcessHandle, GoneProcessIsNotFound) {
  absl::StatusOr<ChildProcess> child = Shell("exit 0");
  ASSERT_TRUE(child.ok()) << child.status();
  const ProcessIdentity identity = child->handle().identity();
  ASSERT_TRUE(child->Wait(kLong).ok());
  EXPECT_TRUE(child->handle().Exited());
  EXPECT_TRUE(absl::IsNotFound(ProcessHandle::Open(identity.pid).status()));
  EXPECT_TRUE(absl::IsNotFound(ProcessHandle::Open(identity).status()));
  EXPECT_TRUE(absl::IsNotFound(ProcessStartTicks(identity.pid).status()));
  EXPECT_TRUE(child->handle().Kill().ok());
}

TEST(ProcessHandle, RecycledNumberIsAnotherProcess) {
  absl::StatusOr<uint64_t> ticks = ProcessStartTicks(::getpid());
  ASSERT_TRUE(ticks.ok());
  EXPECT_TRUE(ProcessHandle::Open({::getpid(), *ticks}).ok());
  EXPECT_TRUE(absl::IsNotFound(ProcessHandle::Open({::getpid(), *ticks - 1}).status()));
}

TEST(ProcessHandle, NonsenseNumbersAreInvalid) {
  EXPECT_TRUE(absl::IsInvalidArgument(ProcessHandle::Open(0).status()));
  EXPECT_TRUE(absl::IsInvalidArgument(ProcessHandle::Open(-1).status()));
}

TEST(ProcessHandle, KillEndsARunningProcessAndDeadlinesHold) {
  Pipe pipe;
  absl::StatusOr<ChildProcess> child =
      ChildProcess::Spawn({.argv = {"/bin/sleep", "1000"}, .output = pipe.write.get()});
  ASSERT_TRUE(child.ok()) << child.status();
  EXPECT_FALSE(child->handle().Exited());
  EXPECT_TRUE(absl::IsDeadlineExceeded(child->handle().AwaitExit(absl::Milliseconds(1))));
  EXPECT_TRUE(absl::IsDeadlineExceeded(child->Wait(absl::ZeroDuration())));
  ASSERT_TRUE(child->handle().Kill().ok());
  const absl::Status result = child->Wait(kLong);
  EXPECT_TRUE(absl::IsAborted(result));
  EXPECT_THAT(std::string(result.message()), HasSubstr("signal 9"));
}

TEST(ChildProcess, ExitStatusIsReported) {
  absl::StatusOr<ChildProcess> child = Shell("exit 3");
  ASSERT_TRUE(child.ok());
  EXPECT_THAT(std::string(child->Wait(kLong).message()), HasSubstr("status 3"));
}

TEST(ChildProcess, MissingExecutableIsAnError) {
  const absl::Status status = ChildProcess::Spawn({.argv = {"/no/such/file"}}).status();
  EXPECT_TRUE(absl::IsNotFound(status)) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr("/no/such/file"));
}

TEST(ChildProcess, GetsItsDescriptorsInOrderAndNothingElse) {
  Pipe pipe;
  Pipe a, b;
  // Without CLOEXEC: must not reach the child either.
  const UniqueFd careless(::open("/dev/null", O_RDONLY));
  absl::StatusOr<ChildProcess> child =
      Shell("echo one >&4; echo two >&3; ls /proc/self/fd | tr '\\n' ' '; echo $NAME$HOME",
            {a.write.get(), b.write.get()}, pipe.write.get());
  ASSERT_TRUE(child.ok()) << child.status();
  EXPECT_EQ(b.Drain(), "one\n");
  EXPECT_EQ(a.Drain(), "two\n");
  // ls itself opens the folder as the lowest free number, 5.
  EXPECT_EQ(pipe.Drain(), "0 1 2 3 4 5 value\n");
  EXPECT_TRUE(child->Wait(kLong).ok());
}

TEST(ChildProcess, NumbersThatAreTheirOwnTargetsMayBeSwapped) {
  // In a child, so that numbers 3 and 4 can be taken.
  const pid_t forked = ::fork();
  if (forked == 0) {
    Pipe a, b;
    const UniqueFd high_a(::fcntl(a.write.get(), F_DUPFD, 100));
    const UniqueFd high_b(::fcntl(b.write.get(), F_DUPFD, 100));
    const UniqueFd read_a(::fcntl(a.read.get(), F_DUPFD, 100));
    const UniqueFd read_b(::fcntl(b.read.get(), F_DUPFD, 100));
    ::dup2(high_a.get(), 3);
    ::dup2(high_b.get(), 4);
    absl::StatusOr<ChildProcess> child = Shell("echo 3 >&3; echo four >&4", {4, 3});
    if (!child.ok() || !child->Wait(kLong).ok()) ::_exit(1);
    std::array<char, 16> buffer;
    if (::read(read_b.get(), buffer.data(), buffer.size()) != 2) ::_exit(2);
    if (::read(read_a.get(), buffer.data(), buffer.size()) != 5) ::_exit(3);
    ::_exit(0);
  }
  int status;
  ASSERT_EQ(::waitpid(forked, &status, 0), forked);
  EXPECT_EQ(WEXITSTATUS(status), 0);
}

TEST(ChildProcess, DestructionKillsAndReaps) {
  pid_t pid;
  {
    absl::StatusOr<ChildProcess> child = ChildProcess::Spawn({.argv = {"/bin/sleep", "1000"}});
    ASSERT_TRUE(child.ok());
    pid = child->pid();
  }
  EXPECT_EQ(::kill(pid, 0), -1);
  EXPECT_EQ(errno, ESRCH);
}

TEST(DieWithParent, RefusesWhenTheParentIsGone) {
  EXPECT_TRUE(absl::IsFailedPrecondition(DieWithParent(::getppid() + 1)));
  EXPECT_TRUE(DieWithParent(::getppid()).ok());
}

}  // namespace
}  // namespace palimpsest
