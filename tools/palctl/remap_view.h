// What `palctl remap --explain` shows, from the broker's answer. Pure.
#ifndef PALIMPSEST_TOOLS_PALCTL_REMAP_VIEW_H_
#define PALIMPSEST_TOOLS_PALCTL_REMAP_VIEW_H_

#include <nlohmann/json.hpp>
#include <string>

#include "absl/time/time.h"
#include "proto/palimpsest/v1/broker.pb.h"

namespace palimpsest::palctl {

// The answer field by field: {"decisions": [...], "totals": [...]}. Infinite times are null; a
// candidate without a rotation has none.
nlohmann::json RemapJson(const v1::GetRemapLogResponse& log);

// One line for each rule and outcome: how often, and how many slabs.
std::string RemapTotalsTable(const v1::GetRemapLogResponse& log);

// Each decision: a line that says what was needed, and a table of who was looked at.
std::string RemapExplanation(const v1::GetRemapLogResponse& log, absl::TimeZone zone);

}  // namespace palimpsest::palctl

#endif  // PALIMPSEST_TOOLS_PALCTL_REMAP_VIEW_H_
