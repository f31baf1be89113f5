#include "router/server/name_resolver.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>

#include "common/mutex.h"

namespace palimpsest::router {
namespace {

using ::testing::Contains;

constexpr absl::Duration kPatience = absl::Seconds(20);

TEST(NameOf, OnlyNamesWithAPortAreResolved) {
  EXPECT_EQ(NameOf("worker-alpha.ns.svc:9110"), (HostPort{"worker-alpha.ns.svc", "9110"}));
  EXPECT_EQ(NameOf("localhost:1"), (HostPort{"localhost", "1"}));
  for (const char* other :
       {"127.0.0.1:9110", "[::1]:9110", "unix:worker.sock", "unix:///run/worker.sock", "worker",
        "ipv4:10.0.0.1:80", "dns:///worker:80", "worker:0", "worker:65536", "worker:http", ":80",
        ""}) {
    EXPECT_EQ(NameOf(other), std::nullopt) << other;
  }
}

TEST(LookUp, TheSystemKnowsLocalhost) {
  const auto found = LookUp({"localhost", "9110"});
  ASSERT_TRUE(found.ok()) << found.status();
  EXPECT_THAT(*found, Contains("127.0.0.1:9110"));
  EXPECT_TRUE(absl::IsUnavailable(LookUp({"no-such-name.invalid", "1"}).status()));
}

TEST(NameResolver, LooksAgainAndAgain) {
  auto lookups = std::make_shared<std::atomic<int>>(0);
  Notification changed;
  NameResolver resolver(
      {{"a", "1"}, {"b", "2"}}, absl::Milliseconds(1),
      [lookups](const HostPort& name) -> absl::StatusOr<std::vector<std::string>> {
        if (name.host == "a") return absl::UnavailableError("no a");
        return std::vector<std::string>{++*lookups < 3 ? "first:2" : "second:2"};
      },
      [&](size_t name, absl::StatusOr<std::vector<std::string>> found) {
        EXPECT_EQ(found.ok(), name == 1);
        if (found.ok() && found->front() == "second:2" && !changed.HasBeenNotified()) {
          changed.Notify();
        }
      });
  EXPECT_TRUE(changed.WaitForNotificationWithTimeout(kPatience));
}

TEST(NameResolver, ALookupThatHangsIsNotWaitedFor) {
  struct Shared {
    Notification looking, go_on, left;
  };
  auto shared = std::make_shared<Shared>();
  {
    NameResolver resolver(
        {{"a", "1"}}, absl::Seconds(1),
        [shared](const HostPort&) {
          shared->looking.Notify();
          shared->go_on.WaitForNotification();
          const std::shared_ptr<void> leave(nullptr, [&](void*) { shared->left.Notify(); });
          return std::vector<std::string>{"x:1"};
        },
        [](size_t, auto) { ADD_FAILURE() << "reported after the end"; });
    ASSERT_TRUE(shared->looking.WaitForNotificationWithTimeout(kPatience));
  }
  shared->go_on.Notify();
  EXPECT_TRUE(shared->left.WaitForNotificationWithTimeout(kPatience));
}

}  // namespace
}  // namespace palimpsest::router
