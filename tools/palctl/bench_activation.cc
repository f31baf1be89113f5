// palctl bench activation: what a request waits for whose model's parameters were all taken.
#include <algorithm>
#include <nlohmann/json.hpp>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/time/clock.h"
#include "common/file.h"
#include "common/monotonic_time.h"
#include "tools/palctl/bench_shapes.h"
#include "tools/palctl/commands.h"
#include "tools/palctl/tenant_node.h"
#include "tools/palctl/text_table.h"
#include "worker/model/image_layout.h"
#include "worker/model/model_config.h"
#include "worker/model/tensor_parallel.h"

namespace palimpsest::palctl {
namespace {

using Json = nlohmann::ordered_json;

constexpr const char* kTenants[] = {"alpha", "beta"};
constexpr int32_t kBlockTokens = 16;
// Of answers that are asked for so that their tenant takes the other's memory.
constexpr int32_t kEvictingBatch = 8, kEvictingTokens = 32;
constexpr int kEvictingAnswers = 100;
constexpr absl::Duration kLongestSettling = absl::Seconds(20);
constexpr absl::Duration kPoll = absl::Milliseconds(2);
constexpr Bytes kWorkspace = GiB(3), kContext = MiB(640);

double Milliseconds(absl::Duration duration) { return absl::ToDoubleMilliseconds(duration); }

double Median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

class ActivationBench {
 public:
  ActivationBench(const BenchActivationOptions& options, const Terminal& terminal)
      : options_(options), terminal_(terminal), slab_(options.cuda ? MiB(32) : MiB(2)) {}

  absl::StatusOr<Json> Run() {
    if (absl::Status status = Start(); !status.ok()) return status;
    // The first round warms up.
    for (int round = 0; round <= options_.rounds; ++round) {
      auto measured = Round(static_cast<size_t>(round) % 2);
      if (!measured.ok()) {
        return absl::Status(measured.status().code(),
                            absl::StrCat(measured.status().message(), "\n", node_->LogEnds()));
      }
      terminal_.err << "activation " << measured->dump() << std::endl;
      if (round > 0) rounds_.push_back(*std::move(measured));
    }
    return Result();
  }

 private:
  absl::Status Start() {
    const auto config = BenchShapeConfig(options_.shape);
    if (!config.ok()) return config.status();
    const auto whole = ParseModelConfig(*config, "");
    if (!whole.ok()) return whole.status();
    const auto ranks = static_cast<int32_t>(options_.gpus.size());
    const auto model = RankConfig(*whole, ranks);
    if (!model.ok()) return model.status();
    const auto layout = LayOutImage(
        *model, slab_, options_.cuda ? WeightFormat::kRowMajor : WeightFormat::kCpuPanels);
    if (!layout.ok()) return layout.status();
    image_ = layout->total;

    TenantNodeOptions node;
    node.binaries = options_.binaries;
    node.cuda = options_.cuda;
    node.gpus = options_.gpus;
    node.slab = slab_;
    const Bytes workspace = options_.cuda ? kWorkspace : Bytes(0);
    if (options_.cuda) node.context = kContext;
    // Warming up needs some, too.
    node.max_sequence_tokens = std::max(options_.prompt_tokens, 128) + kEvictingTokens;
    // One image, and KV for little more than a sequence: whoever runs has everything.
    const int64_t kv_slabs =
        CeilDiv(model->KvBytes(node.max_sequence_tokens + 2 * kBlockTokens), slab_) + 1;
    node.pool = image_ + slab_ * kv_slabs + (workspace + node.context) * 2;
    for (const char* name : kTenants) {
      node.tenants.push_back({name, *config, "", node.pool / 2, workspace});
    }
    auto made = TenantNode::Create(node);
    if (!made.ok()) return made.status();
    node_ = *std::move(made);
    TenantNodeSettings settings;
    settings.policy =
        "min_residence: 10ms, residence_restores: 0, prefetch_grace: 10ms, reversion_delay: 24h";
    // No reserve, which nobody could take from who has it.
    settings.engine = "kv_low_water_slabs: 0, kv_high_water_slabs: 0, kv_shrink_delay: 0s";
    return node_->Run(settings);
  }

  absl::StatusOr<Json> Round(size_t tenant) {
    if (absl::Status status = Evict(tenant); !status.ok()) return status;
    const absl::Time start = MonotonicNow();
    const auto answer = node_->Ask(tenant, 1, options_.prompt_tokens, 1);
    if (!answer.ok()) return answer.status();
    if (absl::Status status = Settle(); !status.ok()) return status;
    Json round = {{"tenant", kTenants[tenant]},
                  {"first_token_ms", Milliseconds(answer->first_token)}};
    const auto memory = node_->BrokerStatus();
    if (!memory.ok()) return memory.status();
    round.update(Parts(*memory, tenant, start));
    const auto again = node_->Ask(tenant, 1, options_.prompt_tokens, 1);
    if (!again.ok()) return again.status();
    round["resident_first_token_ms"] = Milliseconds(again->first_token);
    const auto& load = memory->tenants(static_cast<int>(tenant)).load();
    round["link_bytes_per_second"] = load.image_bytes_per_second();
    return round;
  }

  // Until nothing of its parameters is left, and nobody has anything to do.
  absl::Status Evict(size_t tenant) {
    for (int i = 0; i < kEvictingAnswers; ++i) {
      const auto memory = node_->BrokerStatus();
      if (!memory.ok()) return memory.status();
      if (memory->tenants(static_cast<int>(tenant)).parameter_slabs() == 0) return Settle();
      const auto answer =
          node_->Ask(1 - tenant, kEvictingBatch, options_.prompt_tokens, kEvictingTokens);
      if (!answer.ok()) return answer.status();
    }
    return absl::DeadlineExceededError(
        absl::StrCat(kTenants[tenant], " keeps parameters beside those of the other tenant"));
  }

  // Until the broker knows that nobody runs, and nothing moves.
  absl::Status Settle() {
    const absl::Time deadline = MonotonicNow() + kLongestSettling;
    for (;;) {
      const auto memory = node_->BrokerStatus();
      if (!memory.ok()) return memory.status();
      uint32_t moving = memory->revoking_slabs() + memory->cleaning_slabs();
      for (const v1::TenantMemory& tenant : memory->tenants()) {
        moving += tenant.grants_in_flight() + tenant.revokes_in_flight() + tenant.load().active();
      }
      if (moving == 0) return absl::OkStatus();
      if (MonotonicNow() > deadline) {
        return absl::DeadlineExceededError("memory moves, or a tenant runs, without a request");
      }
      absl::SleepFor(kPoll);
    }
  }

  // When what had happened, in ms since `start`, as the broker saw it.
  static Json Parts(const v1::GetStatusResponse& memory, size_t tenant, absl::Time start) {
    const double begin = absl::ToDoubleSeconds(start - absl::UnixEpoch());
    double first_clean = 0, last_clean = 0, restored = 0, restore = 0;
    uint32_t grants = 0, slabs = 0;
    for (const v1::Transfer& transfer : memory.transfers()) {
      const double at = 1e3 * (transfer.finished_at() - begin);
      if (at < 0) continue;
      if (transfer.kind() == v1::Transfer::KIND_SCRUB) {
        if (first_clean == 0) first_clean = at;
        last_clean = at;
      } else if (transfer.tenant() == kTenants[tenant] &&
                 transfer.role() == v1::SLAB_ROLE_PARAMETER) {
        if (transfer.kind() == v1::Transfer::KIND_RESTORE) {
          ++grants;
          slabs += transfer.slabs();
          restored = at;
          restore += 1e3 * transfer.seconds();
        }
      }
    }
    return {{"first_slabs_clean_ms", first_clean},
            {"last_slabs_clean_ms", last_clean},
            {"parameter_grants", grants},
            {"parameter_slabs", slabs},
            {"restored_ms", restored},
            {"restoring_ms", restore}};
  }

  Json Result() const {
    std::vector<double> first_tokens, resident, links;
    for (const Json& round : rounds_) {
      first_tokens.push_back(round["first_token_ms"]);
      resident.push_back(round["resident_first_token_ms"]);
      links.push_back(round["link_bytes_per_second"]);
    }
    const double link = Median(links);
    const double bound = link > 0 ? 1e3 * static_cast<double>(image_.count()) / link : 0;
    const double first_token = Median(first_tokens);
    return {{"shape", options_.shape},
            {"date", absl::FormatTime("%Y-%m-%dT%H:%M:%SZ", absl::Now(), absl::UTCTimeZone())},
            {"device", options_.cuda ? "cuda" : "cpu"},
            {"gpus", options_.gpus},
            {"prompt_tokens", options_.prompt_tokens},
            {"image_bytes_of_a_rank", image_.count()},
            {"link_bytes_per_second", link},
            {"bound_ms", bound},
            {"first_token_ms", first_token},
            {"first_token_ms_most", *std::max_element(first_tokens.begin(), first_tokens.end())},
            {"of_bound", bound > 0 ? first_token / bound : 0},
            {"resident_first_token_ms", Median(resident)},
            {"rounds", rounds_}};
  }

  const BenchActivationOptions& options_;
  const Terminal& terminal_;
  const Bytes slab_;
  Bytes image_;
  std::unique_ptr<TenantNode> node_;
  std::vector<Json> rounds_;
};

std::string Table(const Json& result) {
  TextTable table({"MEASURED", ">MS"});
  const auto row = [&](const char* what, const char* key) {
    table.AddRow({what, absl::StrFormat("%.2f", result[key].get<double>())});
  };
  row("first token, all parameters taken before", "first_token_ms");
  row("the same, slowest", "first_token_ms_most");
  row("copying the image at the link's speed", "bound_ms");
  row("first token, parameters in place", "resident_first_token_ms");
  return absl::StrCat(table.ToString(), absl::StrFormat("first token / copying: %.3f\n",
                                                        result["of_bound"].get<double>()));
}

}  // namespace

int RunBenchActivation(BenchActivationOptions options, const Terminal& terminal) {
  if (options.binaries.empty()) options.binaries = DefaultBinaries();
  if (options.gpus.empty()) {
    return Fail(terminal, absl::InvalidArgumentError("--gpus needs at least one number"));
  }
  const auto result = ActivationBench(options, terminal).Run();
  if (!result.ok()) return Fail(terminal, result.status());
  if (!options.json_file.empty()) {
    absl::Status status = WriteFileAtomically(options.json_file, result->dump(1) + "\n");
    if (!status.ok()) return Fail(terminal, status);
  }
  terminal.out << Table(*result) << std::flush;
  return kDone;
}

}  // namespace palimpsest::palctl
