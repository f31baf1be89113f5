#include "router/server/health_probe.h"

#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"

namespace palimpsest::router {
namespace {

// HealthCheckResponse { ServingStatus status = 1; }: tag 0x08, then the value; absent is 0.
constexpr char kStatusTag = 0x08;
constexpr char kServing = 1;

absl::Status ParseAnswer(const grpc::ByteBuffer& buffer) {
  std::vector<grpc::Slice> slices;
  if (!buffer.Dump(&slices).ok()) return absl::FailedPreconditionError("unreadable health answer");
  std::string bytes;
  for (const grpc::Slice& slice : slices) {
    bytes.append(reinterpret_cast<const char*>(slice.begin()), slice.size());
  }
  if (bytes == std::string({kStatusTag, kServing})) return absl::OkStatus();
  return absl::FailedPreconditionError("its health service says that it does not serve");
}

}  // namespace

void HealthProbe::Check(grpc::ClientContext* context, std::function<void(absl::Status)> done) {
  const grpc::Slice empty("", 0);
  request_ = grpc::ByteBuffer(&empty, 1);
  stub_.UnaryCall(
      context, "/grpc.health.v1.Health/Check", grpc::StubOptions(), &request_, &response_,
      [this, done = std::move(done)](const grpc::Status& status) {
        if (status.ok()) return done(ParseAnswer(response_));
        const bool answered = status.error_code() == grpc::StatusCode::UNIMPLEMENTED;
        done({answered ? absl::StatusCode::kFailedPrecondition : absl::StatusCode::kUnavailable,
              absl::StrCat("health check failed: ", status.error_message())});
      });
}

}  // namespace palimpsest::router
