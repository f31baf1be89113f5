// How soon a process sees what happens on channels that no call is running on.
#ifndef PALIMPSEST_COMMON_GRPC_IDLE_CHANNELS_H_
#define PALIMPSEST_COMMON_GRPC_IDLE_CHANNELS_H_

#include <stdlib.h>

namespace palimpsest {

// gRPC reads the sockets of a channel while a call runs on it; at other times only every 5 s, so
// that a connection that was made, or a server's farewell, is noticed that late: calls that do not
// wait go on failing though the server is up, and a server that shuts down waits for its idle
// clients. Shortens that to 100 ms, unless the environment says otherwise.
//
// Call it before anything else of gRPC, while the process has one thread.
inline void WatchIdleChannels() {
  ::setenv("GRPC_CLIENT_CHANNEL_BACKUP_POLL_INTERVAL_MS", "100", /*overwrite=*/0);
}

}  // namespace palimpsest

#endif  // PALIMPSEST_COMMON_GRPC_IDLE_CHANNELS_H_
