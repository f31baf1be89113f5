#include "router/server/router_context.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "common/grpc_time.h"
#include "router/server/generate_call.h"

namespace palimpsest::router {

void CallRegistry::Add(GenerateCall* call) {
  MutexLock lock(&mutex_);
  calls_.insert(call);
}

void CallRegistry::Remove(GenerateCall* call) {
  MutexLock lock(&mutex_);
  calls_.erase(call);
  if (calls_.empty()) changed_.SignalAll();
}

void CallRegistry::AwaitEmpty() {
  MutexLock lock(&mutex_);
  while (!calls_.empty()) changed_.Wait(&mutex_);
}

std::vector<std::shared_ptr<GenerateCall>> CallRegistry::Calls() {
  std::vector<std::shared_ptr<GenerateCall>> calls;
  MutexLock lock(&mutex_);
  for (GenerateCall* call : calls_) {
    if (std::shared_ptr<GenerateCall> alive = call->weak_from_this().lock()) {
      calls.push_back(std::move(alive));
    }
  }
  return calls;
}

void CallRegistry::CancelStalled(absl::Time now, absl::Duration timeout) {
  for (const std::shared_ptr<GenerateCall>& call : Calls()) call->CancelIfStalled(now - timeout);
}

void CallRegistry::LeaveSilentWorkers(absl::Time now, absl::Duration timeout) {
  for (const std::shared_ptr<GenerateCall>& call : Calls()) {
    call->LeaveIfSilent(now - timeout, timeout);
  }
}

bool HintsUnderWay::Begin(const std::string& tenant) {
  MutexLock lock(&mutex_);
  int32_t& count = counts_[tenant];
  if (count >= kMost) return false;
  ++count;
  return true;
}

void HintsUnderWay::End(const std::string& tenant) {
  MutexLock lock(&mutex_);
  --counts_[tenant];
}

absl::StatusOr<std::string> RouterContext::Authenticate(
    const grpc::CallbackServerContext& call) const {
  const auto found = call.client_metadata().find("authorization");
  const grpc::string_ref value =
      found == call.client_metadata().end() ? grpc::string_ref() : found->second;
  absl::StatusOr<std::string> tenant =
      tokens.Authenticate(absl::string_view(value.data(), value.size()));
  if (tenant.ok() && limits.count(*tenant) == 0) {
    return absl::PermissionDeniedError(
        absl::StrCat("tenant '", *tenant, "' is not served by this router"));
  }
  return tenant;
}

int32_t RouterContext::MaxSequenceTokens(const std::string& tenant,
                                         const ServedModel& model) const {
  const int32_t polled = workers.MaxSequenceTokens(tenant, model.name);
  const int32_t position = model.folder->max_position;
  return polled == 0 ? position : std::min(polled, position);
}

absl::Time DeadlineOf(const grpc::CallbackServerContext& call) {
  return FromGrpcDeadline(call.raw_deadline());
}

}  // namespace palimpsest::router
