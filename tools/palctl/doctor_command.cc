#include <grpcpp/client_context.h>

#include <nlohmann/json.hpp>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "common/bytes.h"
#include "common/grpc_time.h"
#include "tools/palctl/commands.h"
#include "tools/palctl/text_table.h"
#include "tools/palctl/tier_names.h"

namespace palimpsest::palctl {
namespace {

// There may be as many tiers.
constexpr int kMostTiers = 5;

nlohmann::json DoctorJson(const v1::CheckTiersResponse& response) {
  nlohmann::json tiers = nlohmann::json::array();
  for (const v1::CheckedTier& tier : response.tiers()) {
    tiers.push_back({{"tier", TierName(tier.tier())},
                     {"name", tier.name()},
                     {"error", tier.error()},
                     {"blocks", tier.blocks()},
                     {"store_bytes_per_second", tier.store_bytes_per_second()},
                     {"load_bytes_per_second", tier.load_bytes_per_second()}});
  }
  return {{"tiers", std::move(tiers)}};
}

std::string DoctorTable(const v1::CheckTiersResponse& response) {
  TextTable table({"TIER", "NAME", ">BLOCKS", ">STORE MB/S", ">LOAD MB/S", "RESULT"});
  for (const v1::CheckedTier& tier : response.tiers()) {
    table.AddRow({TierName(tier.tier()), tier.name(), absl::StrCat(tier.blocks()),
                  absl::StrFormat("%.0f", tier.store_bytes_per_second() / 1e6),
                  absl::StrFormat("%.0f", tier.load_bytes_per_second() / 1e6),
                  tier.error().empty() ? "the same bytes came back" : tier.error()});
  }
  return table.ToString();
}

}  // namespace

int RunDoctor(const Node& node, const DoctorOptions& options, const Terminal& terminal) {
  const absl::StatusOr<Bytes> block = ParseBytes(options.block);
  if (!block.ok()) return Fail(terminal, block.status());
  const absl::StatusOr<v1::BlockAdmin::Stub*> admin = node.block_admin();
  if (!admin.ok()) return Fail(terminal, admin.status());
  v1::CheckTiersRequest request;
  request.set_block_bytes(static_cast<uint64_t>(block->count()));
  request.set_blocks(options.blocks);
  request.set_wait_seconds(absl::ToDoubleSeconds(options.timeout));
  v1::CheckTiersResponse response;
  grpc::ClientContext context;
  // Each tier stores, then loads.
  context.set_deadline(GrpcTimeout(options.timeout * 2 * kMostTiers));
  const absl::Status status =
      node.OperatorError((*admin)->CheckTiers(&context, request, &response));
  if (!status.ok()) return Fail(terminal, status);
  if (options.json) {
    terminal.out << DoctorJson(response).dump(1) << std::endl;
  } else {
    terminal.out << DoctorTable(response) << std::flush;
  }
  for (const v1::CheckedTier& tier : response.tiers()) {
    if (!tier.error().empty()) return kFailed;
  }
  return kDone;
}

}  // namespace palimpsest::palctl
