// The arbiter's log of remap decisions as the broker answers it.
#ifndef PALIMPSEST_BROKER_SERVER_REMAP_LOG_VIEW_H_
#define PALIMPSEST_BROKER_SERVER_REMAP_LOG_VIEW_H_

#include <functional>
#include <string>

#include "absl/time/time.h"
#include "broker/core/remap_log.h"
#include "proto/palimpsest/v1/broker.pb.h"

namespace palimpsest {

// What the request asks for. `name` names a tenant; `wall` is what to add to the log's times to get
// those of the wall clock.
v1::GetRemapLogResponse RemapLogView(const RemapLog& log, const v1::GetRemapLogRequest& request,
                                     const std::function<const std::string&(TenantId)>& name,
                                     absl::Duration wall);

}  // namespace palimpsest

#endif  // PALIMPSEST_BROKER_SERVER_REMAP_LOG_VIEW_H_
