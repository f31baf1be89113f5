#include "router/server/name_resolver.h"

#include <arpa/inet.h>
#include <netdb.h>
#include <sys/socket.h>

#include <algorithm>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/strings/ascii.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "common/mutex.h"

namespace palimpsest::router {

std::optional<HostPort> NameOf(absl::string_view target) {
  const size_t colon = target.rfind(':');
  if (colon == absl::string_view::npos) return std::nullopt;
  HostPort name{std::string(target.substr(0, colon)), std::string(target.substr(colon + 1))};
  uint32_t port = 0;
  if (!absl::SimpleAtoi(name.port, &port) || port == 0 || port > 65535) return std::nullopt;
  const auto in_names = [](unsigned char c) {
    return absl::ascii_isalnum(c) || c == '.' || c == '-' || c == '_';
  };
  in_addr address;
  if (name.host.empty() || !std::all_of(name.host.begin(), name.host.end(), in_names) ||
      inet_pton(AF_INET, name.host.c_str(), &address) == 1) {
    return std::nullopt;
  }
  return name;
}

absl::StatusOr<std::vector<std::string>> LookUp(const HostPort& name) {
  addrinfo hints = {};
  hints.ai_family = AF_UNSPEC;
  hints.ai_socktype = SOCK_STREAM;
  addrinfo* list = nullptr;
  const int error = getaddrinfo(name.host.c_str(), name.port.c_str(), &hints, &list);
  const std::unique_ptr<addrinfo, decltype(&freeaddrinfo)> owned(list, &freeaddrinfo);
  if (error != 0) {
    return absl::UnavailableError(absl::StrCat("cannot resolve the name: ", gai_strerror(error)));
  }
  std::vector<std::string> v4;
  std::vector<std::string> v6;
  for (const addrinfo* info = list; info != nullptr; info = info->ai_next) {
    char host[NI_MAXHOST];
    if (getnameinfo(info->ai_addr, info->ai_addrlen, host, sizeof host, nullptr, 0,
                    NI_NUMERICHOST) != 0) {
      continue;
    }
    if (info->ai_family == AF_INET) v4.push_back(absl::StrCat(host, ":", name.port));
    if (info->ai_family == AF_INET6) v6.push_back(absl::StrCat("[", host, "]:", name.port));
  }
  std::vector<std::string> addresses = std::move(v4.empty() ? v6 : v4);
  std::sort(addresses.begin(), addresses.end());
  addresses.erase(std::unique(addresses.begin(), addresses.end()), addresses.end());
  return addresses;
}

struct NameResolver::State {
  std::vector<HostPort> names;
  absl::Duration interval;
  Lookup lookup;
  Report report;

  Mutex mutex;
  CondVar changed;
  bool stopping ABSL_GUARDED_BY(mutex) = false;
  bool looking_up ABSL_GUARDED_BY(mutex) = false;
};

NameResolver::NameResolver(std::vector<HostPort> names, absl::Duration interval, Lookup lookup,
                           Report report)
    : state_(std::make_shared<State>()) {
  state_->names = std::move(names);
  state_->interval = interval;
  state_->lookup = std::move(lookup);
  state_->report = std::move(report);
  if (!state_->names.empty()) thread_ = std::thread([state = state_] { Loop(state); });
}

NameResolver::~NameResolver() {
  if (!thread_.joinable()) return;
  bool abandon = false;
  {
    MutexLock lock(&state_->mutex);
    state_->stopping = true;
    state_->changed.SignalAll();
    abandon = state_->looking_up;
  }
  if (abandon) {
    thread_.detach();
  } else {
    thread_.join();
  }
}

void NameResolver::Loop(const std::shared_ptr<State>& state) {
  for (size_t i = 0;; i = (i + 1) % state->names.size()) {
    {
      MutexLock lock(&state->mutex);
      if (state->stopping) return;
      state->looking_up = true;
    }
    absl::StatusOr<std::vector<std::string>> found = state->lookup(state->names[i]);
    {
      MutexLock lock(&state->mutex);
      state->looking_up = false;
      if (state->stopping) return;
    }
    state->report(i, std::move(found));
    if (i + 1 < state->names.size()) continue;
    MutexLock lock(&state->mutex);
    if (!state->stopping) state->changed.WaitWithTimeout(&state->mutex, state->interval);
  }
}

}  // namespace palimpsest::router
