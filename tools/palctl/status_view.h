// What `palctl status` and `palctl top` show, from the answers of broker and router. Pure.
#ifndef PALIMPSEST_TOOLS_PALCTL_STATUS_VIEW_H_
#define PALIMPSEST_TOOLS_PALCTL_STATUS_VIEW_H_

#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "proto/palimpsest/v1/broker.pb.h"
#include "proto/palimpsest/v1/router.pb.h"

namespace palimpsest::palctl {

// A tenant about which the router could not be asked.
struct RouterProblem {
  std::string tenant;
  std::string error;
};

struct NodeStatus {
  v1::GetStatusResponse broker;
  std::vector<v1::GetTenantStatusResponse> router;
  std::vector<RouterProblem> router_problems;
};

// The broker's answer field by field, with the enumerations in lower case ("parameter", "revoke"),
// loads merged into their tenants, and the arrays "router" and "router_errors".
nlohmann::json StatusJson(const NodeStatus& status);

// The same for people, without the list of finished transfers.
std::string StatusTable(const NodeStatus& status);

// Transfers that finished after `since` (seconds since the Unix epoch), one line for each kind and
// reason.
std::string TransferTable(const v1::GetStatusResponse& broker, double since);

}  // namespace palimpsest::palctl

#endif  // PALIMPSEST_TOOLS_PALCTL_STATUS_VIEW_H_
