#include "worker/server/listen_socket.h"

#include <sys/socket.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace palimpsest {
namespace {

using ::testing::EndsWith;
using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::StartsWith;

bool Listens(const ListenSocket& listen) {
  int listens = 0;
  socklen_t size = sizeof(listens);
  return ::getsockopt(listen.socket.get(), SOL_SOCKET, SO_ACCEPTCONN, &listens, &size) == 0 &&
         listens == 1;
}

TEST(Listen, TakesAFreePortAndSaysWhich) {
  for (const std::string host : {"127.0.0.1", "localhost"}) {
    const auto listen = Listen(host + ":0");
    ASSERT_TRUE(listen.ok()) << listen.status();
    EXPECT_TRUE(Listens(*listen));
    EXPECT_THAT(listen->address, StartsWith(host + ":"));
    EXPECT_THAT(listen->address, Not(EndsWith(":0")));
  }
}

TEST(Listen, TakenPortIsAnError) {
  const auto first = Listen("127.0.0.1:0");
  ASSERT_TRUE(first.ok());
  const auto second = Listen(first->address);
  EXPECT_EQ(second.status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(second.status().message(), HasSubstr(first->address));
}

TEST(Listen, WhatIsNoAddressIsRefused) {
  for (const std::string address : {"", "localhost", "127.0.0.1:no_port", "unix:"}) {
    EXPECT_EQ(Listen(address).status().code(), absl::StatusCode::kFailedPrecondition) << address;
  }
  EXPECT_FALSE(Listen("unix:/" + std::string(200, 'x')).ok());
}

TEST(Listen, SocketFileOfADeadProcessIsReplacedAndNoOther) {
  // TEST_TMPDIR may be too long for a socket's path.
  char folder[] = "/tmp/listen_socket_test.XXXXXX";
  ASSERT_NE(::mkdtemp(folder), nullptr);
  const std::string address = std::string("unix:") + folder + "/worker.sock";
  auto first = Listen(address);
  ASSERT_TRUE(first.ok()) << first.status();
  EXPECT_FALSE(Listen(address).ok()) << "somebody listens there";
  first->socket.Reset();
  auto second = Listen(address);
  EXPECT_TRUE(second.ok()) << second.status();

  const std::string file = std::string(folder) + "/precious";
  std::ofstream(file) << "data";
  EXPECT_FALSE(Listen("unix:" + file).ok());
  EXPECT_TRUE(std::filesystem::is_regular_file(file));
  std::filesystem::remove_all(folder);
}

}  // namespace
}  // namespace palimpsest
