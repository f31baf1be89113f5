// Signs of life between worker and broker. A process that is stopped, or hangs with all its
// threads, keeps its connections open: only an answer to a ping tells that it is there.
#ifndef PALIMPSEST_COMMON_GRPC_KEEPALIVE_H_
#define PALIMPSEST_COMMON_GRPC_KEEPALIVE_H_

#include <grpcpp/server_builder.h>
#include <grpcpp/support/channel_arguments.h>

#include "absl/time/time.h"

namespace palimpsest {

// A connection over which nothing came for kPingAfter is pinged, and closed if nothing comes within
// kPingPatience: its calls end with UNAVAILABLE.
inline constexpr absl::Duration kPingAfter = absl::Seconds(2);
inline constexpr absl::Duration kPingPatience = absl::Seconds(3);

// The two ends belong together: a server that does not permit it closes connections that ping.
void Keepalive(grpc::ChannelArguments& arguments);
void PermitKeepalive(grpc::ServerBuilder& builder);

}  // namespace palimpsest

#endif  // PALIMPSEST_COMMON_GRPC_KEEPALIVE_H_
