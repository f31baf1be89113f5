// Resolves the workers' host names to all their addresses, again and again, in the background.
//
// Threads: one of its own does the lookups, one name after the other, and calls `report` after
// each. The destructor does not wait for a lookup that hangs; no report runs after it.
#ifndef PALIMPSEST_ROUTER_SERVER_NAME_RESOLVER_H_
#define PALIMPSEST_ROUTER_SERVER_NAME_RESOLVER_H_

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"

namespace palimpsest::router {

struct HostPort {
  std::string host;
  std::string port;

  friend bool operator==(const HostPort&, const HostPort&) = default;
};

// The parts of a target that is NAME:PORT; nullopt if it is anything else that gRPC understands,
// such as an IP address or unix:PATH.
std::optional<HostPort> NameOf(absl::string_view target);

// Asks the system. Addresses as ADDRESS:PORT, sorted, without repeats: the IPv4 ones, or if there
// are none the IPv6 ones, as a worker with both is still one worker. Blocks.
absl::StatusOr<std::vector<std::string>> LookUp(const HostPort& name);

class NameResolver {
 public:
  using Lookup = std::function<absl::StatusOr<std::vector<std::string>>(const HostPort& name)>;
  // Called with an index into `names`.
  using Report = std::function<void(size_t name, absl::StatusOr<std::vector<std::string>> found)>;

  // Begins at once. `lookup` must own what it uses.
  NameResolver(std::vector<HostPort> names, absl::Duration interval, Lookup lookup, Report report);
  ~NameResolver();

 private:
  struct State;
  static void Loop(const std::shared_ptr<State>& state);

  const std::shared_ptr<State> state_;  // shared with the thread, which may stay in a lookup
  std::thread thread_;
};

}  // namespace palimpsest::router

#endif  // PALIMPSEST_ROUTER_SERVER_NAME_RESOLVER_H_
