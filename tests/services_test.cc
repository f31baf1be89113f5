// What every process of a node answers beside its own services: health checks and reflection. Asked
// without generated code, which Debian's gRPC does not have for them.
#include <gmock/gmock.h>
#include <grpcpp/generic/generic_stub.h>
#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "common/grpc_time.h"
#include "common/mutex.h"
#include "router/server/health_probe.h"
#include "tests/node.h"

namespace palimpsest {
namespace {

using ::testing::HasSubstr;

constexpr absl::Duration kPatience = absl::Seconds(20);

absl::Status Health(const std::shared_ptr<grpc::Channel>& channel) {
  grpc::ClientContext context;
  context.set_deadline(GrpcTimeout(kPatience));
  router::HealthProbe probe(channel);
  absl::Status health;
  Notification done;
  probe.Check(&context, [&](absl::Status status) {
    health = std::move(status);
    done.Notify();
  });
  done.WaitForNotification();
  return health;
}

// Fields of ServerReflectionRequest that are strings.
enum class Question : char { kFileContainingSymbol = 4, kListServices = 7 };

// The bytes of the answer, in which names lie as they are. A stream of one message each way is what
// a unary call is too. `text`: at most 127 bytes.
std::string Reflect(const std::shared_ptr<grpc::Channel>& channel, Question question,
                    absl::string_view text) {
  constexpr char kLengthDelimited = 2;
  std::string bytes = {static_cast<char>(static_cast<char>(question) << 3 | kLengthDelimited),
                       static_cast<char>(text.size())};
  absl::StrAppend(&bytes, text);
  const grpc::Slice slice(bytes);
  const grpc::ByteBuffer request(&slice, 1);
  grpc::ByteBuffer response;
  grpc::ClientContext context;
  context.set_deadline(GrpcTimeout(kPatience));
  grpc::GenericStub stub(channel);
  grpc::Status status;
  Notification done;
  stub.UnaryCall(&context, "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
                 grpc::StubOptions(), &request, &response, [&](grpc::Status result) {
                   status = std::move(result);
                   done.Notify();
                 });
  done.WaitForNotification();
  EXPECT_TRUE(status.ok()) << status.error_message();
  std::vector<grpc::Slice> slices;
  if (!status.ok() || !response.Dump(&slices).ok()) return "";
  std::string answer;
  for (const grpc::Slice& part : slices) answer.append(part.begin(), part.end());
  return answer;
}

struct Service {
  const char* socket;
  const char* name;
  const char* file;
};

constexpr Service kServices[] = {
    {"broker.sock", "palimpsest.v1.Broker", "proto/palimpsest/v1/broker.proto"},
    {"broker.sock", "palimpsest.v1.BlockStore", "proto/palimpsest/v1/block_store.proto"},
    {"worker-alpha.sock", "palimpsest.v1.Worker", "proto/palimpsest/v1/worker.proto"},
    {"router.sock", "palimpsest.v1.Router", "proto/palimpsest/v1/router.proto"},
};

TEST(Services, EveryProcessIsHealthyAndSaysWhatItServes) {
  NodeOptions options;
  options.tenants = {{"alpha"}};
  Node node(options);
  node.Start();
  for (const Service& service : kServices) {
    SCOPED_TRACE(service.name);
    const std::shared_ptr<grpc::Channel> channel =
        grpc::CreateChannel(absl::StrCat("unix:", node.folder(), "/", service.socket),
                            grpc::InsecureChannelCredentials());
    const absl::Status health = Health(channel);
    EXPECT_TRUE(health.ok()) << health;
    EXPECT_THAT(Reflect(channel, Question::kListServices, "*"), HasSubstr(service.name));
    EXPECT_THAT(Reflect(channel, Question::kFileContainingSymbol, service.name),
                HasSubstr(service.file));
  }
  EXPECT_TRUE(node.StopAll().ok());
}

}  // namespace
}  // namespace palimpsest
