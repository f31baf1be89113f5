#include "tools/palctl/remap_config.h"

#include <algorithm>
#include <map>
#include <set>
#include <tuple>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "common/gpu_list.h"
#include "tools/palctl/bench_shapes.h"

namespace palimpsest::palctl {
namespace {

constexpr size_t kMostItems = 64;
constexpr double kMostRate = 100'000;
constexpr int32_t kMostTokens = 1 << 20;
constexpr size_t kLongestName = 40;
constexpr Bytes kMostWorkspace = GiB(64);

// Names become parts of file names, of YAML and of plots.
std::string Name(ConfigReader& reader, absl::string_view key = "name") {
  std::string name = reader.String(key);
  const bool plain = std::all_of(name.begin(), name.end(), [](char c) {
    return absl::ascii_isalnum(static_cast<unsigned char>(c)) || c == '-' || c == '_' || c == '.';
  });
  if (name.empty() || name.size() > kLongestName || !plain || name[0] == '.') {
    reader.Error(key, absl::StrCat("expected 1 to ", kLongestName, " of a-z A-Z 0-9 - _ ."));
  }
  return name;
}

RemapTenant ReadTenant(ConfigReader& reader, const RemapBenchConfig& config) {
  RemapTenant tenant;
  tenant.name = Name(reader);
  tenant.shape = reader.String("shape", "");
  tenant.folder = reader.String("model", "");
  tenant.share = reader.Double("share", 0.001, 1);
  tenant.requests = reader.Double("requests", 0, 1e6, 1.0);
  tenant.workspace = reader.Size("workspace", Bytes(0), kMostWorkspace, config.workspace);
  if (!config.cuda && tenant.workspace > Bytes(0)) {
    reader.Error("workspace", "only for device: cuda");
  }
  tenant.settings = reader.String("settings", "");
  if (tenant.shape.empty() == tenant.folder.empty()) {
    reader.Error("name", "expected either a shape or a model (a folder)");
  } else if (!tenant.shape.empty()) {
    const auto known = BenchShapeConfig(tenant.shape);
    if (!known.ok()) reader.Error("shape", known.status().message());
  }
  return tenant;
}

RemapSystem ReadSystem(ConfigReader& reader) {
  RemapSystem system;
  system.name = Name(reader);
  system.policy = reader.String("policy", "");
  system.pool = reader.String("pool", "");
  system.tenants = reader.String("tenants", "");
  system.engine = reader.String("engine", "");
  system.tiers = reader.String("tiers", "");
  system.fixed_shares = reader.Bool("fixed_shares", false);
  system.floors = reader.Bool("floors", system.fixed_shares);
  return system;
}

template <typename T, typename Parse>
std::vector<T> Numbers(ConfigReader& reader, absl::string_view key, T most, Parse parse) {
  std::vector<T> numbers;
  for (const std::string& text : reader.Strings(key, kMostItems)) {
    T number = 0;
    if (!parse(text, &number) || !(number >= 0 && number <= most)) {
      reader.Error(key, absl::StrCat("expected numbers up to ", most, ", got '", text, "'"));
    }
    numbers.push_back(number);
  }
  return numbers;
}

std::vector<int32_t> Integers(ConfigReader& reader, absl::string_view key, int32_t most) {
  return Numbers<int32_t>(reader, key, most, [](const std::string& text, int32_t* number) {
    return absl::SimpleAtoi(text, number);
  });
}

RemapRun ReadRun(ConfigReader& reader, const RemapBenchConfig& config) {
  RemapRun run;
  run.name = Name(reader);
  run.systems = reader.Strings("systems", kMostItems);
  for (const std::string& name : run.systems) {
    const bool known = std::any_of(config.systems.begin(), config.systems.end(),
                                   [&](const RemapSystem& system) { return system.name == name; });
    if (!known) reader.Error("systems", absl::StrCat("there is no system '", name, "'"));
  }
  if (run.systems.empty()) {
    for (const RemapSystem& system : config.systems) run.systems.push_back(system.name);
  }
  run.rates = Numbers<double>(
      reader, "rates", kMostRate,
      [](const std::string& text, double* number) { return absl::SimpleAtod(text, number); });
  if (run.rates.empty() || std::find(run.rates.begin(), run.rates.end(), 0) != run.rates.end()) {
    reader.Error("rates", "expected at least one number of requests a second, all above 0");
  }
  std::sort(run.rates.begin(), run.rates.end());
  run.prompt_tokens = Integers(reader, "prompt_tokens", kMostTokens);
  if (config.conversations.has_value() && !run.prompt_tokens.empty()) {
    reader.Error("prompt_tokens", "not with conversations, whose turns have lengths of their own");
  }
  if (run.prompt_tokens.empty()) run.prompt_tokens = {0};
  const auto all = static_cast<int32_t>(config.tenants.size());
  run.tenants = Integers(reader, "tenants", all);
  if (std::find(run.tenants.begin(), run.tenants.end(), 0) != run.tenants.end()) {
    reader.Error("tenants", "expected at least one tenant");
  }
  if (run.tenants.empty()) run.tenants = {all};
  return run;
}

void ReadTraces(ConfigReader traces, RemapBenchConfig& config) {
  config.arrivals_file = traces.String("arrivals");
  config.lengths_file = traces.String("lengths");
  const auto number = [&traces](absl::string_view key, int32_t& value) {
    value = static_cast<int32_t>(traces.Int(key, 1, kMostTokens, value));
  };
  number("characters_per_token", config.lengths.characters_per_token);
  number("least_prompt", config.lengths.least_prompt);
  number("most_prompt", config.lengths.most_prompt);
  number("most_output", config.lengths.most_output);
  if (config.lengths.least_prompt > config.lengths.most_prompt) {
    traces.Error("least_prompt", "expected at most most_prompt");
  }
}

load::ConversationRules ReadConversations(ConfigReader reader) {
  load::ConversationRules rules;
  const auto tokens = [&reader](absl::string_view key) {
    return static_cast<int32_t>(reader.Int(key, 0, kMostTokens, 0));
  };
  rules.system_tokens = tokens("system_tokens");
  rules.context_tokens = tokens("context_tokens");
  rules.tool_share = reader.Double("tool_share", 0, 1, 0.0);
  const auto wait = [&reader](absl::string_view key, absl::Duration fallback) {
    return reader.Duration(key, absl::ZeroDuration(), absl::Hours(24), fallback);
  };
  rules.tool_wait = wait("tool_wait", absl::Seconds(1));
  rules.human_wait = wait("human_wait", absl::Seconds(10));
  return rules;
}

void ReadMachine(ConfigReader& root, RemapBenchConfig& config) {
  config.cuda = root.Choice<bool>("device", {{"cpu", false}, {"cuda", true}});
  config.gpus = ReadGpus(root, config.cuda);
  config.slab = root.Size("slab_bytes", MiB(2), GiB(1), config.cuda ? MiB(32) : MiB(2));
  config.memory = root.Size("memory", config.slab, GiB(1 << 14));
  config.workspace =
      root.Size("workspace", Bytes(0), kMostWorkspace, config.cuda ? GiB(1) : Bytes(0));
  config.context = root.Size("context", Bytes(0), GiB(64), config.cuda ? MiB(640) : Bytes(0));
  if (!config.cuda && (config.workspace > Bytes(0) || config.context > Bytes(0))) {
    root.Error("device", "workspace and context are only for device: cuda");
  }
  config.max_sequence_tokens =
      static_cast<int32_t>(root.Int("max_sequence_tokens", 1, kMostTokens, 2048));
  config.policy = root.String("policy", "");
  config.engine = root.String("engine", "");
}

void ReadLoad(ConfigReader& root, RemapBenchConfig& config) {
  ReadTraces(root.Map("traces"), config);
  if (root.Has("conversations")) {
    config.conversations = ReadConversations(root.Map("conversations"));
  }
  config.seed = static_cast<uint64_t>(root.Int("seed", 0, int64_t{1} << 53, 1));
  config.duration = root.Duration("duration", absl::Milliseconds(100), absl::Hours(2));
  config.warm_up =
      root.Duration("warm_up", absl::ZeroDuration(), absl::Hours(2), absl::ZeroDuration());
  if (config.warm_up >= config.duration) root.Error("warm_up", "expected less than duration");
  config.drain = root.Duration("drain", absl::ZeroDuration(), absl::Hours(2), config.duration / 2);
  config.sample_interval = root.Duration("sample_interval", absl::Milliseconds(10),
                                         absl::Minutes(1), absl::Milliseconds(250));
  ConfigReader objective = root.Map("objective");
  config.objective.ttft = objective.Duration("ttft", absl::Milliseconds(1), absl::Hours(1));
  config.objective.tbt = objective.Duration("tbt", absl::Milliseconds(1), absl::Hours(1));
  config.stop_below = root.Double("stop_below", 0, 1, 0.5);
  config.raw_requests = root.Bool("raw_requests", false);
  const load::ConversationRules around = config.conversations.value_or(load::ConversationRules());
  if (config.max_sequence_tokens < config.lengths.most_prompt + config.lengths.most_output +
                                       around.system_tokens + around.context_tokens) {
    root.Error("max_sequence_tokens",
               "expected at least most_prompt + most_output of the traces, and system_tokens + "
               "context_tokens of conversations");
  }
}

template <typename Item>
void CheckNames(ConfigReader& root, absl::string_view key, const std::vector<Item>& items) {
  std::set<std::string> names;
  for (const Item& item : items) {
    if (!names.insert(item.name).second) {
      root.Error(key, absl::StrCat("expected different names, two are '", item.name, "'"));
    }
  }
  if (items.empty()) root.Error(key, "expected at least one");
}

void CheckShares(ConfigReader& root, const RemapBenchConfig& config) {
  double share = 0, requests = 0;
  for (const RemapTenant& tenant : config.tenants) {
    share += tenant.share;
    requests += tenant.requests;
  }
  if (share > 1 + 1e-9) root.Error("tenants", "the shares are more than 1 together");
  if (requests <= 0) root.Error("tenants", "expected requests for at least one tenant");
}

}  // namespace

absl::StatusOr<RemapBenchConfig> ReadRemapBenchConfig(YamlConfig& yaml) {
  ConfigReader root = yaml.root();
  RemapBenchConfig config;
  config.name = Name(root);
  ReadMachine(root, config);
  ReadLoad(root, config);
  for (ConfigReader& reader : root.Maps("tenants", kMostItems)) {
    config.tenants.push_back(ReadTenant(reader, config));
  }
  for (ConfigReader& reader : root.Maps("systems", kMostItems)) {
    config.systems.push_back(ReadSystem(reader));
  }
  for (ConfigReader& reader : root.Maps("runs", kMostItems)) {
    config.runs.push_back(ReadRun(reader, config));
    for (const int32_t tokens : config.runs.back().prompt_tokens) {
      if (tokens + config.lengths.most_output > config.max_sequence_tokens) {
        reader.Error("prompt_tokens", "with most_output it exceeds max_sequence_tokens");
      }
    }
  }
  CheckNames(root, "tenants", config.tenants);
  CheckNames(root, "systems", config.systems);
  CheckNames(root, "runs", config.runs);
  CheckShares(root, config);
  if (absl::Status status = yaml.Finish(); !status.ok()) return status;
  return config;
}

std::vector<RemapNodeRun> ExpandRuns(const RemapBenchConfig& config) {
  std::vector<RemapNodeRun> nodes;
  std::map<std::tuple<double, int32_t, int32_t>, uint64_t> loads;
  const auto node = [&](const RemapSystem& system, int32_t tenants) -> RemapNodeRun& {
    for (RemapNodeRun& known : nodes) {
      if (known.system == &system && known.tenants == tenants) return known;
    }
    return nodes.emplace_back(RemapNodeRun{&system, tenants, {}});
  };
  for (const RemapRun& run : config.runs) {
    for (const std::string& name : run.systems) {
      const auto system =
          std::find_if(config.systems.begin(), config.systems.end(),
                       [&](const RemapSystem& candidate) { return candidate.name == name; });
      for (const int32_t tenants : run.tenants) {
        for (const int32_t prompt_tokens : run.prompt_tokens) {
          for (const double rate : run.rates) {
            const uint64_t load =
                loads.try_emplace({rate, prompt_tokens, tenants}, loads.size()).first->second;
            node(*system, tenants).points.push_back({&run, rate, prompt_tokens, load});
          }
        }
      }
    }
  }
  return nodes;
}

}  // namespace palimpsest::palctl
