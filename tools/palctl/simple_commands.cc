#include <grpcpp/client_context.h>

#include <algorithm>
#include <nlohmann/json.hpp>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "common/grpc_time.h"
#include "common/monotonic_time.h"
#include "common/text/utf8.h"
#include "tools/palctl/commands.h"

namespace palimpsest::palctl {
namespace {

constexpr absl::Duration kUnaryTimeout = absl::Seconds(10);
constexpr int64_t kWarmUpCalls = 50;

void SetTimeout(grpc::ClientContext& context, absl::Duration timeout) {
  context.set_deadline(GrpcTimeout(timeout));
}

// A context with the tenant's token; the only known tenant if none is named.
absl::Status PrepareCall(const Node& node, std::string tenant, absl::Duration timeout,
                         grpc::ClientContext& context) {
  if (tenant.empty()) {
    absl::StatusOr<std::string> only = node.OnlyTenant();
    if (!only.ok()) return only.status();
    tenant = *std::move(only);
  }
  SetTimeout(context, timeout);
  return node.Authorize(tenant, context);
}

// The smallest value that at least `share` of the sorted `values` do not exceed.
double Percentile(const std::vector<double>& values, double share) {
  const auto rank = static_cast<size_t>(share * static_cast<double>(values.size()));
  return values[std::min(rank, values.size() - 1)];
}

}  // namespace

int Fail(const Terminal& terminal, const absl::Status& status) {
  terminal.err << "palctl: " << status.message() << std::endl;
  switch (status.code()) {
    case absl::StatusCode::kInvalidArgument:
      return kUsage;
    case absl::StatusCode::kUnavailable:
      return kUnreachable;
    case absl::StatusCode::kCancelled:
      return kInterrupted;
    default:
      return kFailed;
  }
}

int RunTokenize(const Node& node, const TokenizeOptions& options, const Terminal& terminal) {
  const absl::Status utf8 = CheckUtf8(options.text, "the text");
  if (!utf8.ok()) return Fail(terminal, utf8);
  const absl::StatusOr<v1::Router::Stub*> router = node.router();
  if (!router.ok()) return Fail(terminal, router.status());
  grpc::ClientContext context;
  const absl::Status prepared = PrepareCall(node, options.tenant, kUnaryTimeout, context);
  if (!prepared.ok()) return Fail(terminal, prepared);
  v1::TokenizeRequest request;
  request.set_model(options.model);
  if (options.chat) {
    v1::ChatMessage* message = request.mutable_chat()->add_messages();
    message->set_role("user");
    message->set_content(options.text);
  } else {
    request.set_text(options.text);
  }
  v1::TokenizeResponse response;
  const absl::Status status = node.RouterError((*router)->Tokenize(&context, request, &response));
  if (!status.ok()) return Fail(terminal, status);
  const std::vector<int32_t> ids(response.token_ids().begin(), response.token_ids().end());
  if (options.json) {
    terminal.out << nlohmann::json({{"token_ids", ids}}).dump() << std::endl;
  } else {
    terminal.out << absl::StrJoin(ids, " ") << std::endl;
  }
  return kDone;
}

int RunDrain(const Node& node, const DrainOptions& options, const Terminal& terminal) {
  const absl::StatusOr<v1::Router::Stub*> router = node.router();
  if (!router.ok()) return Fail(terminal, router.status());
  grpc::ClientContext context;
  const absl::Status prepared = PrepareCall(node, options.tenant, options.timeout, context);
  if (!prepared.ok()) return Fail(terminal, prepared);
  v1::DrainTenantResponse response;
  const absl::Status status = node.RouterError((*router)->DrainTenant(&context, {}, &response));
  if (!status.ok()) return Fail(terminal, status);
  if (response.remaining_requests() > 0) {
    return Fail(terminal, absl::DeadlineExceededError(absl::StrCat(
                              response.remaining_requests(),
                              " requests still run; the workers take no new ones: try again")));
  }
  terminal.out << "drained: the tenant's workers run no request and take none" << std::endl;
  return kDone;
}

int RunBenchControl(const Node& node, const BenchControlOptions& options,
                    const Terminal& terminal) {
  const absl::StatusOr<v1::Broker::Stub*> broker = node.broker();
  if (!broker.ok()) return Fail(terminal, broker.status());
  std::vector<double> seconds;
  v1::GetStatusResponse response;
  for (int64_t i = 0; i < kWarmUpCalls + options.calls; ++i) {
    grpc::ClientContext context;
    SetTimeout(context, kUnaryTimeout);
    const absl::Time start = MonotonicNow();
    const absl::Status status = node.BrokerError((*broker)->GetStatus(&context, {}, &response));
    const absl::Duration took = MonotonicNow() - start;
    if (!status.ok()) return Fail(terminal, status);
    if (i >= kWarmUpCalls) seconds.push_back(absl::ToDoubleSeconds(took));
  }
  std::sort(seconds.begin(), seconds.end());
  const double p50 = Percentile(seconds, 0.5);
  const double p99 = Percentile(seconds, 0.99);
  if (options.json) {
    terminal.out << nlohmann::json({{"calls", options.calls},
                                    {"answer_bytes", response.ByteSizeLong()},
                                    {"p50_seconds", p50},
                                    {"p99_seconds", p99}})
                        .dump()
                 << std::endl;
  } else {
    terminal.out << absl::StrFormat(
                        "control round trip (GetStatus, %d bytes, %d calls, one at a time): p50 "
                        "%.0f us, p99 %.0f "
                        "us\n",
                        response.ByteSizeLong(), options.calls, p50 * 1e6, p99 * 1e6)
                 << std::flush;
  }
  return kDone;
}

}  // namespace palimpsest::palctl
