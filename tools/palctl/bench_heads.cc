#include "tools/palctl/bench_heads.h"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_set.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "common/file.h"
#include "common/text/tokenizer.h"
#include "tools/load/trace.h"
#include "tools/palctl/heads_bench.h"
#include "tools/palctl/text_table.h"
#include "worker/core/head_profile.h"

namespace palimpsest::palctl {
namespace {

using nlohmann::json;
using Texts = std::vector<HeadsBench::Tokens>;

// Conversations come once for each of their turns; those with the same beginning are one.
constexpr size_t kBeginning = 200;

struct Row {
  std::string dropped;  // which heads
  double keep = 1;
  int32_t heads = 0;  // dropped
  double mass = 0;    // of all attention mass that far keys get, the share of the dropped heads
  Bytes freed;        // of a sequence
  HeadsBench::Perplexity perplexity;
};

struct Report {
  HeadsBench::Samples samples;
  Bytes sequence;  // its KV
  std::vector<Row> rows;
};

// One text of `context` tokens from each conversation that is long enough.
absl::StatusOr<Texts> ReadTexts(const BenchHeadsOptions& options) {
  const auto content = load::ReadTraceFile(options.text_file);
  if (!content.ok()) return content.status();
  auto prompts = load::ParsePrompts(*content);
  if (!prompts.ok()) return prompts.status();
  const auto tokenizer = Tokenizer::Load(options.model_folder);
  if (!tokenizer.ok()) return tokenizer.status();
  std::stable_sort(prompts->begin(), prompts->end(),
                   [](const auto& a, const auto& b) { return a.text.size() > b.text.size(); });
  const size_t wanted = static_cast<size_t>(options.sequences) + options.sampled_sequences;
  absl::flat_hash_set<std::string> seen;
  Texts texts;
  for (const load::PromptText& prompt : *prompts) {
    if (texts.size() == wanted) break;
    if (!seen.insert(prompt.text.substr(0, kBeginning)).second) continue;
    auto tokens = (*tokenizer)->Encode(prompt.text, {.parse_special = false});
    if (!tokens.ok()) return tokens.status();
    if (std::ssize(*tokens) < options.bench.context) continue;
    tokens->resize(static_cast<size_t>(options.bench.context));
    texts.push_back(*std::move(tokens));
  }
  if (texts.size() < wanted) {
    return absl::InvalidArgumentError(absl::StrCat(
        options.text_file, ": expected ", wanted, " conversations of ", options.bench.context,
        " tokens, got ", texts.size(), "; lower --sequences, --sampled-sequences or --context"));
  }
  return texts;
}

// Other orders of the same heads, to see what that by effect is worth.
enum class Order { kEffect, kMass, kReverse };

HeadProfile Reordered(HeadProfile profile, Order order) {
  if (order == Order::kMass) profile.effect = profile.mass;
  if (order == Order::kReverse) {
    const float most = *std::max_element(profile.effect.begin(), profile.effect.end());
    for (float& effect : profile.effect) effect = most - effect;
  }
  return profile;
}

const char* NameOf(Order order) {
  switch (order) {
    case Order::kEffect:
      return "lossy: least effect";
    case Order::kMass:
      return "lossy: least mass";
    case Order::kReverse:
      return "lossy: greatest effect";
  }
  return "";
}

double MassOf(const HeadProfile& profile, const LossyHeads& heads) {
  double dropped = 0, all = 0;
  for (size_t h = 0; h < profile.mass.size(); ++h) {
    all += profile.mass[h];
    if (heads.any() && heads.dropped[h] != 0) dropped += profile.mass[h];
  }
  return all > 0 ? dropped / all : 0;
}

absl::StatusOr<Row> MeasureRow(HeadsBench& bench, const BenchHeadsOptions& options,
                               absl::Span<const HeadsBench::Tokens> texts,
                               const HeadProfile& profile, double keep, Order order) {
  const auto heads = ChooseLossyHeads(Reordered(profile, order), keep);
  if (!heads.ok()) return heads.status();
  auto perplexity = bench.Measure(texts, *heads);
  if (!perplexity.ok()) return perplexity.status();
  Row row;
  row.dropped = heads->any() ? NameOf(order) : "none (lossless)";
  row.keep = keep;
  row.heads = heads->count();
  row.mass = MassOf(profile, *heads);
  row.freed = heads->FreedBytes(options.bench.context, HeadsBench::kBlockTokens, bench.HeadBytes());
  row.perplexity = *perplexity;
  return row;
}

absl::StatusOr<Report> MakeReport(const BenchHeadsOptions& options, const Terminal& terminal) {
  const auto texts = ReadTexts(options);
  if (!texts.ok()) return texts.status();
  auto bench = HeadsBench::Create(options.model_folder, options.bench);
  if (!bench.ok()) return bench.status();
  const auto all = absl::MakeConstSpan(*texts);
  const auto scored = all.subspan(options.sampled_sequences);
  auto samples = (*bench)->Sample(all.first(options.sampled_sequences));
  if (!samples.ok()) return samples.status();
  Report report;
  report.samples = *std::move(samples);
  if (!options.rank_by_file.empty()) {
    const auto text = ReadFile(options.rank_by_file, MiB(16));
    if (!text.ok()) return text.status();
    auto profile = HeadProfile::Parse(*text);
    if (!profile.ok()) return profile.status();
    const ModelConfig& config = (*bench)->config();
    const absl::Status fits = profile->CheckModel(config.num_layers, config.num_kv_heads);
    if (!fits.ok()) return fits;
    report.samples.profile = *std::move(profile);
  }
  report.sequence = (*bench)->config().KvBytes(options.bench.context);
  std::vector<std::pair<double, Order>> budgets = {{1.0, Order::kEffect}};
  for (const double keep : options.keeps) budgets.emplace_back(keep, Order::kEffect);
  for (const double keep : options.control_keeps) {
    budgets.emplace_back(keep, Order::kMass);
    budgets.emplace_back(keep, Order::kReverse);
  }
  for (const auto& [keep, order] : budgets) {
    const auto row = MeasureRow(**bench, options, scored, report.samples.profile, keep, order);
    if (!row.ok()) return row.status();
    terminal.err << absl::StrFormat("keep %.3f, %s: perplexity %.3f in %.0f s\n", keep,
                                    row->dropped, row->perplexity.value,
                                    absl::ToDoubleSeconds(row->perplexity.took));
    report.rows.push_back(*row);
  }
  return report;
}

double FreedShare(const Report& report, const Row& row) {
  return static_cast<double>(row.freed.count()) / static_cast<double>(report.sequence.count());
}

// A sample's share of the time of decoding, if one is taken every so many steps.
double SampleCost(const HeadsBench::Samples& samples, int32_t every) {
  return absl::FDivDuration(samples.sampled_step - samples.plain_step, samples.plain_step) / every;
}

json ToJson(const BenchHeadsOptions& options, const Report& report) {
  json rows = json::array();
  for (const Row& row : report.rows) {
    rows.push_back(
        {{"dropped", row.dropped},
         {"lossy", row.heads > 0},
         {"keep", row.keep},
         {"dropped_heads", row.heads},
         {"dropped_mass_share", row.mass},
         {"freed_bytes_per_sequence", row.freed.count()},
         {"freed_share", FreedShare(report, row)},
         {"perplexity", row.perplexity.value},
         {"perplexity_ratio", row.perplexity.value / report.rows.front().perplexity.value},
         {"scored_tokens", row.perplexity.tokens}});
  }
  const HeadsBench::Samples& samples = report.samples;
  return {{"context_tokens", options.bench.context},
          {"recent_tokens", options.bench.recent_tokens},
          {"sequences", options.sequences},
          {"kv_bytes_per_sequence", report.sequence.count()},
          {"head_mass", samples.profile.mass},
          {"head_effect", samples.profile.effect},
          {"samples", samples.profile.samples},
          {"decode_sequences", std::min(options.bench.batch, options.sampled_sequences)},
          {"plain_step_seconds", absl::ToDoubleSeconds(samples.plain_step)},
          {"sampled_step_seconds", absl::ToDoubleSeconds(samples.sampled_step)},
          {"rows", std::move(rows)}};
}

void Print(const BenchHeadsOptions& options, const Report& report, std::ostream& out) {
  const HeadsBench::Samples& samples = report.samples;
  std::vector<float> mass = samples.profile.mass;
  std::sort(mass.begin(), mass.end());
  out << absl::StrFormat(
      "%d heads; far keys get %.3f of the weights of the coldest, %.3f of the median, %.3f of the "
      "hottest (%d samples)\n",
      mass.size(), mass.front(), mass[mass.size() / 2], mass.back(), samples.profile.samples);
  out << absl::StrFormat(
      "a decode step of %d sequences takes %.2f ms, %.2f ms with a sample: %.2f %% of the time at "
      "one in 64 steps\n",
      std::min(options.bench.batch, options.sampled_sequences),
      absl::ToDoubleMilliseconds(samples.plain_step),
      absl::ToDoubleMilliseconds(samples.sampled_step), 100 * SampleCost(samples, 64));
  TextTable table({"dropped", ">keep", ">heads dropped", ">of the far mass", ">freed a sequence",
                   ">of its KV", ">perplexity", ">ratio"});
  for (const Row& row : report.rows) {
    table.AddRow(
        {row.dropped, absl::StrFormat("%.1f %%", 100 * row.keep), absl::StrCat(row.heads),
         absl::StrFormat("%.1f %%", 100 * row.mass),
         absl::StrFormat("%.1f MiB", static_cast<double>(row.freed.count()) / (1 << 20)),
         absl::StrFormat("%.1f %%", 100 * FreedShare(report, row)),
         absl::StrFormat("%.3f", row.perplexity.value),
         absl::StrFormat("%.3f", row.perplexity.value / report.rows.front().perplexity.value)});
  }
  out << table.ToString();
}

}  // namespace

void AddBenchHeads(CLI::App& bench, BenchHeadsOptions& options) {
  CLI::App* heads = bench.add_subcommand(
      "heads",
      "how unequal a model's KV heads are, and what dropping the far keys of the coldest (lossy) "
      "costs in perplexity on real text; computed here, on the CPU");
  heads->add_option("--model", options.model_folder, "folder of the model")
      ->required()
      ->type_name("FOLDER");
  heads
      ->add_option("--text", options.text_file,
                   "conversations: JSON as ShareGPT's for LMBenchmark, .gz or not")
      ->required()
      ->type_name("FILE");
  heads->add_option("--sequences", options.sequences, "conversations that are scored")
      ->check(CLI::Range(1, 100'000))
      ->capture_default_str();
  heads
      ->add_option("--sampled-sequences", options.sampled_sequences,
                   "other conversations, over which heads are sampled")
      ->check(CLI::Range(1, 100'000))
      ->capture_default_str();
  heads->add_option("--context", options.bench.context, "tokens of each")->capture_default_str();
  heads->add_option("--scored", options.bench.scored, "the last of them, which are scored")
      ->capture_default_str();
  heads->add_option("--recent", options.bench.recent_tokens, "tokens that every head keeps")
      ->check(CLI::Range(1, 1 << 20))
      ->capture_default_str();
  heads->add_option("--batch", options.bench.batch, "sequences that decode together")
      ->check(CLI::Range(1, 1024))
      ->capture_default_str();
  heads->add_option("--threads", options.bench.threads, "0: one per CPU")
      ->check(CLI::Range(0, 1024));
  heads->add_option("--keep", options.keeps, "budgets: shares of the heads that keep all their KV")
      ->delimiter(',')
      ->check(CLI::Range(0.0, 1.0));
  heads
      ->add_option("--control", options.control_keeps,
                   "budgets at which heads are also dropped in other orders: by mass, and the "
                   "other way round")
      ->delimiter(',')
      ->check(CLI::Range(0.0, 1.0));
  heads
      ->add_option("--profile", options.profile_file,
                   "write the heads' mass to this file, for a worker's engine.heads.profile")
      ->type_name("FILE");
  heads
      ->add_option("--rank-by", options.rank_by_file,
                   "rank the heads by the profile in this file, a worker's for example")
      ->type_name("FILE");
  heads->add_flag("--json", options.json, "{rows: [{keep, perplexity, ...}], head_mass, ...}");
}

int RunBenchHeads(const BenchHeadsOptions& options, const Terminal& terminal) {
  const auto report = MakeReport(options, terminal);
  if (!report.ok()) return Fail(terminal, report.status());
  if (!options.profile_file.empty()) {
    const absl::Status written =
        WriteFileAtomically(options.profile_file, report->samples.profile.ToJson());
    if (!written.ok()) return Fail(terminal, written);
  }
  if (options.json) {
    terminal.out << ToJson(options, *report).dump() << "\n";
  } else {
    Print(options, *report, terminal.out);
  }
  return kDone;
}

}  // namespace palimpsest::palctl
