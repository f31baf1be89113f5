// palctl bench remap: systems that share memory among tenants, under the same traffic.
#include <algorithm>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <set>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "common/file.h"
#include "common/json_text.h"
#include "tools/palctl/bench_machine.h"
#include "tools/palctl/bench_shapes.h"
#include "tools/palctl/commands.h"
#include "tools/palctl/memory_history.h"
#include "tools/palctl/remap_config.h"
#include "tools/palctl/remap_results.h"
#include "tools/palctl/tenant_node.h"
#include "tools/palctl/tier_hits.h"

namespace palimpsest::palctl {
namespace {

using Json = nlohmann::ordered_json;
namespace fs = std::filesystem;

constexpr absl::Duration kLongestIdle = absl::Minutes(2);
constexpr size_t kLongestResult = size_t{256} << 20;

class RemapBench {
 public:
  RemapBench(RemapBenchConfig config, const BenchRemapOptions& options, const Terminal& terminal)
      : config_(std::move(config)), options_(options), terminal_(terminal) {}

  absl::Status ReadTraces(const fs::path& folder) {
    const auto csv = load::ReadTraceFile((folder / config_.arrivals_file).string());
    if (!csv.ok()) return csv.status();
    auto arrivals = load::ParseArrivals(*csv);
    if (!arrivals.ok()) return InFile(config_.arrivals_file, arrivals.status());
    traces_.arrivals = *std::move(arrivals);
    const auto json = load::ReadTraceFile((folder / config_.lengths_file).string());
    if (!json.ok()) return json.status();
    if (config_.conversations.has_value()) {
      auto conversations = load::ParseConversations(*json, config_.lengths);
      if (!conversations.ok()) return InFile(config_.lengths_file, conversations.status());
      traces_.conversations = *std::move(conversations);
    } else {
      auto lengths = load::ParseLengths(*json, config_.lengths);
      if (!lengths.ok()) return InFile(config_.lengths_file, lengths.status());
      traces_.lengths = *std::move(lengths);
    }
    return absl::OkStatus();
  }

  Json Schedules() const { return SchedulesJson(config_, traces_); }

  // Everything that is configured; what a system fails at is in the result.
  absl::Status Measure(const std::string& config_text) {
    result_ = {{"name", config_.name},
               {"date", BenchDate()},
               {"commit", BenchCommit()},
               {"hardware", BenchHardware(config_.cuda ? config_.gpus : std::vector<int>())},
               {"objective",
                {{"ttft_s", absl::ToDoubleSeconds(config_.objective.ttft)},
                 {"tbt_s", absl::ToDoubleSeconds(config_.objective.tbt)}}},
               {"duration_s", absl::ToDoubleSeconds(config_.duration)},
               {"warm_up_s", absl::ToDoubleSeconds(config_.warm_up)},
               {"drain_s", absl::ToDoubleSeconds(config_.drain)},
               {"config", config_text},
               {"starts", Json::array()},
               {"refused", Json::array()},
               {"failed", Json::array()},
               {"points", Json::array()}};
    const std::vector<RemapNodeRun> runs = ExpandRuns(config_);
    // Nodes of equally many tenants are one node whose settings change.
    std::vector<int32_t> counts;
    for (const RemapNodeRun& run : runs) {
      if (std::find(counts.begin(), counts.end(), run.tenants) == counts.end()) {
        counts.push_back(run.tenants);
      }
    }
    for (const int32_t tenants : counts) {
      if (absl::Status status = MeasureNode(tenants, runs); !status.ok()) return status;
    }
    return Save();
  }

  const Json& result() const { return result_; }
  // Whether requests are turns of conversations.
  bool talks() const { return config_.conversations.has_value(); }

 private:
  static absl::Status InFile(const std::string& file, const absl::Status& status) {
    return absl::Status(status.code(), absl::StrCat(file, ": ", status.message()));
  }

  absl::Status MeasureNode(int32_t tenants, const std::vector<RemapNodeRun>& runs) {
    TenantNodeOptions options;
    options.binaries = options_.binaries;
    options.folder = options_.folder;
    options.cuda = config_.cuda;
    options.gpus = config_.gpus;
    options.slab = config_.slab;
    options.context = config_.context;
    options.max_sequence_tokens = config_.max_sequence_tokens;
    names_.clear();
    for (int32_t i = 0; i < tenants; ++i) {
      const RemapTenant& tenant = config_.tenants[static_cast<size_t>(i)];
      TenantNodeOptions::Tenant& one = options.tenants.emplace_back();
      one.name = tenant.name;
      one.model_folder = tenant.folder;
      one.workspace = tenant.workspace;
      one.share =
          Bytes(static_cast<int64_t>(tenant.share * static_cast<double>(config_.memory.count())));
      options.pool += one.share;
      if (tenant.folder.empty()) {
        auto shape = BenchShapeConfig(tenant.shape);
        if (!shape.ok()) return shape.status();
        one.model_config = *std::move(shape);
      }
      names_.push_back(tenant.name);
    }
    auto node = TenantNode::Create(options);
    if (!node.ok()) return node.status();
    for (const RemapNodeRun& run : runs) {
      if (run.tenants != tenants) continue;
      if (absl::Status status = MeasureSystem(**node, run); !status.ok()) return status;
    }
    return absl::OkStatus();
  }

  TenantNodeSettings Settings(const RemapNodeRun& run) const {
    const auto join = [](const std::string& a, const std::string& b) {
      return a.empty() || b.empty() ? a + b : absl::StrCat(a, ", ", b);
    };
    TenantNodeSettings settings;
    settings.policy = join(config_.policy, run.system->policy);
    settings.pool = run.system->pool;
    settings.engine = join(config_.engine, run.system->engine);
    settings.tiers = run.system->tiers;
    settings.floors = run.system->floors;
    settings.fixed_shares = run.system->fixed_shares;
    for (int32_t i = 0; i < run.tenants; ++i) {
      settings.tenants.push_back(
          join(config_.tenants[static_cast<size_t>(i)].settings, run.system->tenants));
    }
    return settings;
  }

  // A system that fails is noted, and the next one has its turn; only an output that cannot be
  // written ends everything.
  absl::Status MeasureSystem(TenantNode& node, const RemapNodeRun& run) {
    const std::string& system = run.system->name;
    terminal_.err << system << ", " << run.tenants << " tenants: starting" << std::endl;
    const absl::Time start = MonotonicNow();
    if (absl::Status status = node.Run(Settings(run)); !status.ok()) {
      const bool refused = absl::IsInvalidArgument(status);
      terminal_.err << system << (refused ? " is refused: " : " failed: ") << status.message()
                    << std::endl;
      result_[refused ? "refused" : "failed"].push_back(
          {{"system", system}, {"message", std::string(status.message())}});
      return absl::OkStatus();
    }
    const double seconds = absl::ToDoubleSeconds(MonotonicNow() - start);
    result_["starts"].push_back(
        {{"system", system}, {"tenants", run.tenants}, {"seconds", seconds}});
    terminal_.err << absl::StrFormat("%s: ready after %.1f s", system, seconds) << std::endl;
    // Of a run and a length of prompts.
    std::set<std::pair<const RemapRun*, int32_t>> saturated;
    for (const RemapPoint& point : run.points) {
      if (saturated.contains({point.run, point.prompt_tokens})) continue;
      auto measured = MeasurePoint(node, run, point);
      if (!measured.ok()) {
        terminal_.err << system << " failed: " << measured.status().message() << std::endl;
        result_["failed"].push_back(
            {{"system", system},
             {"run", point.run->name},
             {"rate", point.rate},
             {"message", absl::StrCat(measured.status().message(), "\n", node.LogEnds())}});
        return absl::OkStatus();
      }
      if ((*measured)["goodput_share"].get<double>() < config_.stop_below) {
        saturated.emplace(point.run, point.prompt_tokens);
      }
      const Json one = Json::array({*measured});
      terminal_.err << PointTable(one) << TierHitsTable(one) << std::flush;
      result_["points"].push_back(*std::move(measured));
      if (absl::Status status = Save(); !status.ok()) return status;
    }
    return absl::OkStatus();
  }

  absl::StatusOr<Json> MeasurePoint(TenantNode& node, const RemapNodeRun& run,
                                    const RemapPoint& point) {
    if (absl::Status status = node.AwaitIdle(kLongestIdle); !status.ok()) return status;
    const auto before = Look(node);
    if (!before.ok()) return before.status();
    const auto schedule = LoadOf(config_, run.tenants, point, traces_);
    load::LoadGenerator generator(node.targets());
    MemorySampler sampler(names_, config_.sample_interval, [&] { return node.BrokerStatus(); });
    const auto records = generator.Run(
        schedule, {.cutoff = config_.duration + config_.drain, .last_turn = config_.duration},
        [&](const load::LoadProgress& now) {
          terminal_.err << absl::StrFormat(
              "%s %g/s: %3.0f s, %d of %d requests sent, %d ended\n", run.system->name, point.rate,
              absl::ToDoubleSeconds(now.now), now.sent, now.requests, now.ended);
        });
    const MemoryHistory memory = sampler.Stop();
    const auto after = Look(node);
    if (!after.ok()) return after.status();
    Json json = {
        {"run", point.run->name}, {"system", run.system->name},           {"tenants", run.tenants},
        {"rate", point.rate},     {"prompt_tokens", point.prompt_tokens}, {"load", point.load}};
    json.update(RecordsJson(config_, records));
    uint64_t preemptions = 0;
    for (size_t i = 0; i < before->workers.size(); ++i) {
      preemptions += after->workers[i].preemptions_total() - before->workers[i].preemptions_total();
    }
    json["preemptions"] = preemptions;
    if (config_.conversations.has_value()) json["hits"] = TierHitsJson(*before, *after);
    json["memory"] = memory.ToJson();
    return json;
  }

  static absl::StatusOr<NodeCounters> Look(TenantNode& node) {
    auto broker = node.BrokerStatus();
    if (!broker.ok()) return broker.status();
    auto workers = node.WorkerStats();
    if (!workers.ok()) return workers.status();
    return NodeCounters{*std::move(broker), *std::move(workers)};
  }

  absl::Status Save() const {
    if (options_.json_file.empty()) return absl::OkStatus();
    return WriteFileAtomically(options_.json_file, ResultText(result_));
  }

  const RemapBenchConfig config_;
  const BenchRemapOptions options_;
  const Terminal& terminal_;
  RemapTraces traces_;
  std::vector<std::string> names_;  // of the node's tenants
  Json result_;
};

absl::Status Plot(const BenchRemapOptions& options, const Json& result) {
  if (options.plot_file.empty()) return absl::OkStatus();
  const std::string title =
      absl::StrCat(result.value("name", ""), ", ", result.value("date", "").substr(0, 10));
  return WriteFileAtomically(options.plot_file,
                             DrawSvg(title, PointPanels(result["points"]), kPanelColumns));
}

// Results that were measured before, the points of all files together.
absl::StatusOr<Json> ReadResults(const std::vector<std::string>& files) {
  Json all;
  for (const std::string& file : files) {
    const auto text = ReadFile(file, Bytes(static_cast<int64_t>(kLongestResult)));
    if (!text.ok()) return text.status();
    // Checked by the strict reader, read in the order of the file.
    const auto valid = ParseJson(*text, {.max_bytes = kLongestResult});
    if (!valid.ok()) return valid.status();
    Json result = Json::parse(*text);
    if (!result.is_object() || !result.contains("points") || !result["points"].is_array()) {
      return absl::InvalidArgumentError(
          absl::StrCat(file, ": expected a result of palctl bench remap or vllm_remap.py"));
    }
    if (all.is_null()) {
      all = std::move(result);
    } else {
      for (Json& point : result["points"]) all["points"].push_back(std::move(point));
    }
  }
  return all;
}

void Show(const Json& result, const Terminal& terminal) {
  terminal.out << PointTable(result["points"]) << TierHitsTable(result["points"]) << std::flush;
}

int Redraw(const BenchRemapOptions& options, const Terminal& terminal) {
  const auto result = ReadResults(options.from);
  if (!result.ok()) return Fail(terminal, result.status());
  if (absl::Status status = Plot(options, *result); !status.ok()) return Fail(terminal, status);
  Show(*result, terminal);
  return kDone;
}

}  // namespace

int RunBenchRemap(BenchRemapOptions options, const Terminal& terminal) {
  if (!options.from.empty()) return Redraw(options, terminal);
  if (options.config_file.empty()) {
    return Fail(terminal, absl::InvalidArgumentError("expected --config or --from"));
  }
  if (options.binaries.empty()) options.binaries = DefaultBinaries();
  auto yaml = YamlConfig::ReadFile(options.config_file);
  if (!yaml.ok()) return Fail(terminal, yaml.status());
  auto config = ReadRemapBenchConfig(*yaml);
  if (!config.ok()) return Fail(terminal, config.status());
  // Paths in it are relative to it.
  const fs::path folder = fs::path(options.config_file).parent_path();
  for (RemapTenant& tenant : config->tenants) {
    if (!tenant.folder.empty()) tenant.folder = (folder / tenant.folder).string();
  }
  RemapBench bench(*std::move(config), options, terminal);
  absl::Status status =
      bench.ReadTraces(options.traces.empty() ? folder : fs::path(options.traces));
  if (status.ok() && !options.schedules_file.empty() && bench.talks()) {
    status = absl::InvalidArgumentError(
        "no schedules of conversations: what turns ask depends on the answers before them");
  }
  if (status.ok() && !options.schedules_file.empty()) {
    status = WriteFileAtomically(options.schedules_file, ResultText(bench.Schedules()));
    return status.ok() ? kDone : Fail(terminal, status);
  }
  if (status.ok()) status = bench.Measure(yaml->EffectiveYaml());
  if (status.ok()) status = Plot(options, bench.result());
  if (!status.ok()) return Fail(terminal, status);
  Show(bench.result(), terminal);
  return bench.result()["failed"].empty() ? kDone : kFailed;
}

}  // namespace palimpsest::palctl
