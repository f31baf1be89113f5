// What the broker asks of the machine at start.
#ifndef PALIMPSEST_BROKER_SERVER_HOST_CHECKS_H_
#define PALIMPSEST_BROKER_SERVER_HOST_CHECKS_H_

#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace palimpsest {

// The running kernel's boot id.
absl::StatusOr<std::string> BootId();

// Makes way for a listener on a Unix socket: the file of a dead one is removed. AlreadyExists if
// somebody listens there, FailedPrecondition if the file is no socket.
absl::Status ClearSocketPath(const std::string& path);

}  // namespace palimpsest

#endif  // PALIMPSEST_BROKER_SERVER_HOST_CHECKS_H_
