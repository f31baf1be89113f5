#include <algorithm>
#include <nlohmann/json.hpp>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "broker/core/sizing/kv_sizing.h"
#include "broker/core/sizing/model_shape.h"
#include "common/bytes.h"
#include "common/file.h"
#include "tools/palctl/commands.h"
#include "tools/palctl/text_table.h"

namespace palimpsest::palctl {
namespace {

using nlohmann::json;

struct Memory {
  std::string name;
  Bytes bytes;
};

struct Plan {
  ModelShape model;
  KvSizing sizing;
  KvSizing multi_head;
  std::vector<Memory> memories;
  int64_t tokens;
};

// "80GiB", or "T1=512GiB" where there are several.
absl::StatusOr<std::vector<Memory>> ReadMemories(const std::vector<std::string>& texts) {
  constexpr size_t kMostNameChars = 32;
  std::vector<Memory> memories;
  for (const std::string& text : texts) {
    const size_t equals = text.find('=');
    const bool named = equals != std::string::npos;
    Memory memory = {named ? text.substr(0, equals) : "memory", Bytes(0)};
    const bool known = std::any_of(memories.begin(), memories.end(),
                                   [&](const Memory& other) { return other.name == memory.name; });
    if (memory.name.empty() || memory.name.size() > kMostNameChars || known) {
      return absl::InvalidArgumentError(absl::StrCat("--memory '", text.substr(0, 80),
                                                     "': expected SIZE once, or NAME=SIZE with "
                                                     "different names of up to ",
                                                     kMostNameChars, " characters"));
    }
    auto bytes = ParseBytes(named ? absl::string_view(text).substr(equals + 1) : text);
    if (!bytes.ok()) {
      return absl::InvalidArgumentError(absl::StrCat("--memory ", bytes.status().message()));
    }
    memory.bytes = *bytes;
    memories.push_back(std::move(memory));
  }
  return memories;
}

absl::StatusOr<ShardOptions> ReadShard(const PlanOptions& options) {
  auto format = FindKvFormat(options.kv_dtype);
  if (!format.ok()) return format.status();
  if (options.kv_scale_bytes.has_value()) format->scale_bytes = *options.kv_scale_bytes;
  if (options.kv_scale_group.has_value()) format->scale_group = *options.kv_scale_group;
  return ShardOptions{.format = *format, .ranks = options.ranks};
}

absl::StatusOr<KvSizing> SizeGroups(absl::StatusOr<std::vector<KvGroup>> groups,
                                    int64_t block_tokens) {
  if (!groups.ok()) return groups.status();
  return KvSizing::Create(*std::move(groups), block_tokens);
}

absl::StatusOr<Plan> MakePlan(const PlanOptions& options) {
  auto memories = ReadMemories(options.memories);
  if (!memories.ok()) return memories.status();
  const auto shard = ReadShard(options);
  if (!shard.ok()) return shard.status();
  const auto text = ReadFile(options.config_file, MiB(1));
  if (!text.ok()) return text.status();
  auto model = ParseModelShape(*text);
  if (!model.ok()) {
    return absl::Status(model.status().code(),
                        absl::StrCat(options.config_file, ": ", model.status().message()));
  }
  auto sizing = SizeGroups(KvGroups(*model, *shard), options.block_tokens);
  if (!sizing.ok()) return sizing.status();
  auto multi_head = SizeGroups(MultiHeadGroups(*model, *shard), options.block_tokens);
  if (!multi_head.ok()) return multi_head.status();
  return Plan{*std::move(model), *std::move(sizing), *std::move(multi_head), *std::move(memories),
              options.tokens};
}

// Of the layers that keep most.
Bytes TokenLayerBytes(const KvSizing& sizing) {
  Bytes most;
  for (const KvGroup& group : sizing.groups()) most = std::max(most, group.token_bytes);
  return most;
}

// Whole sequences: each lies in one of the memories.
int64_t MaxSequences(const KvSizing& sizing, const Plan& plan) {
  int64_t sum = 0;
  for (const Memory& memory : plan.memories) sum += sizing.MaxBatch(plan.tokens, memory.bytes);
  return sum;
}

std::string Kept(const KvGroup& group) {
  switch (group.reach.kind) {
    case KvReach::Kind::kWindow:
      return absl::StrCat("the last ", group.reach.tokens, " tokens");
    case KvReach::Kind::kChunk:
      return absl::StrCat("chunks of ", group.reach.tokens, " tokens");
    case KvReach::Kind::kAll:
      break;
  }
  return group.token_bytes > Bytes(0) ? "all tokens" : "a state";
}

json PlanJson(const Plan& plan, const PlanOptions& options) {
  json groups = json::array();
  for (const KvGroup& group : plan.sizing.groups()) {
    groups.push_back({{"layers", group.layers},
                      {"keeps", Kept(group)},
                      {"bytes_per_token_layer", group.token_bytes.count()},
                      {"state_bytes_per_layer", group.state_bytes.count()},
                      {"block_bytes", group.BlockBytes(options.block_tokens).count()},
                      {"blocks_per_sequence", group.Blocks(plan.tokens, options.block_tokens)}});
  }
  json memories = json::array();
  for (const Memory& memory : plan.memories) {
    memories.push_back({{"name", memory.name},
                        {"bytes", memory.bytes.count()},
                        {"max_sequences", plan.sizing.MaxBatch(plan.tokens, memory.bytes)},
                        {"mha_max_sequences", plan.multi_head.MaxBatch(plan.tokens, memory.bytes)},
                        {"max_tokens", plan.sizing.MaxTokens(memory.bytes)}});
  }
  return {{"model_type", plan.model.model_type},
          {"layers", plan.model.layers.size()},
          {"tokens", plan.tokens},
          {"tp", options.ranks},
          {"kv_dtype", options.kv_dtype},
          {"block_tokens", options.block_tokens},
          {"bytes_per_token_layer", TokenLayerBytes(plan.sizing).count()},
          {"bytes_per_sequence", plan.sizing.BytesFor(plan.tokens).count()},
          {"max_sequences", MaxSequences(plan.sizing, plan)},
          {"mha_bytes_per_token_layer", TokenLayerBytes(plan.multi_head).count()},
          {"mha_bytes_per_sequence", plan.multi_head.BytesFor(plan.tokens).count()},
          {"mha_max_sequences", MaxSequences(plan.multi_head, plan)},
          {"groups", std::move(groups)},
          {"memory", std::move(memories)}};
}

std::string Exactly(Bytes bytes) {
  return bytes < KiB(1) ? bytes.ToString()
                        : absl::StrCat(bytes.count(), " B (", bytes.ToString(), ")");
}

void PrintPlan(const Plan& plan, const PlanOptions& options, std::ostream& out) {
  out << plan.model.model_type << ", " << plan.model.layers.size() << " layers; KV in "
      << options.kv_dtype << ", blocks of " << options.block_tokens << " tokens";
  if (options.ranks > 1) out << "; of each of " << options.ranks << " GPUs";
  out << "\n\n";
  TextTable groups({">layers", "keep", ">per token and layer", ">state of a layer", ">blocks"});
  for (const KvGroup& group : plan.sizing.groups()) {
    groups.AddRow({absl::StrCat(group.layers), Kept(group),
                   absl::StrCat(group.token_bytes.count(), " B"),
                   absl::StrCat(group.state_bytes.count(), " B"),
                   absl::StrCat(group.Blocks(plan.tokens, options.block_tokens))});
  }
  out << groups.ToString() << '\n';
  const Bytes sequence = plan.sizing.BytesFor(plan.tokens);
  const Bytes multi_head = plan.multi_head.BytesFor(plan.tokens);
  TextTable sizes({"", ">this model", ">as multi-head attention"});
  sizes.AddRow({"a token in a layer", absl::StrCat(TokenLayerBytes(plan.sizing).count(), " B"),
                absl::StrCat(TokenLayerBytes(plan.multi_head).count(), " B")});
  sizes.AddRow({absl::StrCat("a sequence of ", plan.tokens, " tokens"), Exactly(sequence),
                Exactly(multi_head)});
  for (const Memory& memory : plan.memories) {
    sizes.AddRow({absl::StrCat("sequences in ", memory.name, ", ", memory.bytes.ToString()),
                  absl::StrCat(plan.sizing.MaxBatch(plan.tokens, memory.bytes)),
                  absl::StrCat(plan.multi_head.MaxBatch(plan.tokens, memory.bytes))});
    const int64_t longest = plan.sizing.MaxTokens(memory.bytes);
    sizes.AddRow({absl::StrCat("longest sequence in ", memory.name),
                  longest == KvSizing::kMaxTokens ? "any" : absl::StrCat(longest, " tokens"),
                  absl::StrCat(plan.multi_head.MaxTokens(memory.bytes), " tokens")});
  }
  out << sizes.ToString();
  out << absl::StrFormat(
      "\nMulti-head sizing would set aside %.1f times the memory.\n",
      static_cast<double>(multi_head.count()) / static_cast<double>(sequence.count()));
  if (plan.model.max_position.has_value() && plan.tokens > *plan.model.max_position) {
    out << "The model's configuration ends at " << *plan.model.max_position << " tokens.\n";
  }
}

}  // namespace

int RunPlan(const PlanOptions& options, const Terminal& terminal) {
  const absl::StatusOr<Plan> plan = MakePlan(options);
  if (!plan.ok()) return Fail(terminal, plan.status());
  if (options.json) {
    terminal.out << PlanJson(*plan, options).dump(1) << std::endl;
  } else {
    PrintPlan(*plan, options, terminal.out);
    terminal.out << std::flush;
  }
  return kDone;
}

}  // namespace palimpsest::palctl
