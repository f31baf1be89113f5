// palctl bench prefix: the time to the first token of a prompt whose prefix is computed, in T0, in
// host memory (T1) or on a disk (T3).
#include <grpcpp/client_context.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <optional>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/substitute.h"
#include "absl/time/clock.h"
#include "common/file.h"
#include "common/grpc_status.h"
#include "common/grpc_time.h"
#include "common/monotonic_time.h"
#include "tools/palctl/bench_machine.h"
#include "tools/palctl/bench_shapes.h"
#include "tools/palctl/commands.h"
#include "tools/palctl/tenant_node.h"
#include "tools/palctl/text_table.h"
#include "tools/palctl/tier_hits.h"
#include "worker/model/image_layout.h"
#include "worker/model/model_config.h"
#include "worker/model/tensor_parallel.h"

namespace palimpsest::palctl {
namespace {

using Json = nlohmann::ordered_json;

constexpr char kTenant[] = "alpha";
// A block that a later request does not look for: its last token is always computed.
constexpr int32_t kQuestion = static_cast<int32_t>(kBlockTokens);
constexpr int32_t kAnswer = 32;
constexpr int32_t kEvictingPrompt = 512;
constexpr Bytes kWorkspace = GiB(3), kContext = MiB(640);
constexpr Bytes kLongestConfig = MiB(1);
constexpr absl::Duration kLongestSettling = absl::Minutes(2);
constexpr absl::Duration kCall = absl::Seconds(70);
constexpr absl::Duration kPoll = absl::Milliseconds(5);
// Nothing has moved for so long: nothing will.
constexpr absl::Duration kQuiet = absl::Milliseconds(200);

double Median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

// Where the prefix was when it was asked for.
enum Where : size_t { kComputed, kT0, kT1, kT3, kWheres };
constexpr const char* kNames[] = {"computed", "T0", "T1 (dram)", "T3 (nvme)"};

struct Measured {
  BenchClient::Reply reply;
  uint64_t t1_blocks = 0, t3_blocks = 0;  // that the request asked for and got from there
};

// Tokens before the first that differs.
size_t CommonTokens(const std::vector<int32_t>& a, const std::vector<int32_t>& b) {
  return static_cast<size_t>(std::mismatch(a.begin(), a.end(), b.begin(), b.end()).first -
                             a.begin());
}

const v1::TierMemory* TierOf(const v1::GetStatusResponse& status, const char* name) {
  for (const v1::TierMemory& tier : status.tiers()) {
    if (tier.tier() == name && tier.tenants_size() > 0) return &tier;
  }
  return nullptr;
}

class PrefixBench {
 public:
  PrefixBench(const BenchPrefixOptions& options, const Terminal& terminal)
      : options_(options),
        terminal_(terminal),
        slab_(options.cuda ? MiB(32) : MiB(2)),
        prefix_blocks_(static_cast<uint64_t>(options.prefix_tokens / kBlockTokens)) {}

  absl::StatusOr<Json> Run() {
    if (absl::Status status = Start(); !status.ok()) return status;
    // The first round warms up, and the worker learns what loading costs.
    for (int round = 0; round <= options_.rounds; ++round) {
      auto measured = Round();
      if (!measured.ok()) {
        return absl::Status(measured.status().code(),
                            absl::StrCat(measured.status().message(), "\n", node_->LogEnds()));
      }
      terminal_.err << "round " << round;
      for (size_t where = 0; where < kWheres; ++where) {
        const BenchClient::Reply& reply = (*measured)[where].reply;
        terminal_.err << absl::StrFormat("  %s %.1f ms (%d cached)", kNames[where],
                                         absl::ToDoubleMilliseconds(reply.first_token),
                                         reply.cached_tokens);
      }
      terminal_.err << std::endl;
      if (round > 0) rounds_.push_back(*std::move(measured));
    }
    return Result();
  }

 private:
  using RoundResult = std::vector<Measured>;  // by Where

  absl::StatusOr<std::string> ModelText() const {
    if (options_.model.empty()) return BenchShapeConfig(options_.shape);
    return ReadFile(options_.model + "/config.json", kLongestConfig);
  }

  absl::Status Start() {
    const auto text = ModelText();
    if (!text.ok()) return text.status();
    const auto whole = ParseModelConfig(*text, "");
    if (!whole.ok()) return whole.status();
    const auto ranks = static_cast<int32_t>(options_.gpus.size());
    const auto model = RankConfig(*whole, ranks);
    if (!model.ok()) return model.status();
    const auto layout = LayOutImage(
        *model, slab_, options_.cuda ? WeightFormat::kRowMajor : WeightFormat::kCpuPanels);
    if (!layout.ok()) return layout.status();

    TenantNodeOptions node;
    node.binaries = options_.binaries;
    node.folder = options_.folder;
    node.cuda = options_.cuda;
    node.gpus = options_.gpus;
    node.slab = slab_;
    if (options_.cuda) node.context = kContext;
    const Bytes workspace = options_.cuda ? kWorkspace : Bytes(0);
    node.max_sequence_tokens = options_.prefix_tokens + kQuestion + kAnswer;
    // Room for one such sequence: whatever else is asked drives it out.
    const int64_t kv_slabs =
        CeilDiv(model->KvBytes(node.max_sequence_tokens + 2 * kBlockTokens), slab_) + 1;
    const Bytes block = model->KvBytes(kBlockTokens);
    capacity_tokens_ = slab_ * kv_slabs / block * kBlockTokens;
    block_bytes_ = block * ranks;
    node.pool = layout->total + slab_ * kv_slabs + workspace + node.context;
    node.tenants.push_back(
        {kTenant, options_.model.empty() ? *text : "", options_.model, node.pool, workspace});
    auto made = TenantNode::Create(node);
    if (!made.ok()) return made.status();
    node_ = *std::move(made);
    TenantNodeSettings settings;
    settings.engine = absl::Substitute("kv_low_water_slabs: $0, kv_high_water_slabs: $0", kv_slabs);
    // What a round stores, more than once. What goes down does so under the worker's eyes.
    const Bytes chunk = options_.cuda ? MiB(256) : MiB(64);
    const int64_t chunks = CeilDiv(block_bytes_ * (capacity_tokens_ / kBlockTokens) * 6, chunk) + 1;
    settings.tiers = absl::Substitute(
        "dram: {bytes: $0 MiB, chunk_bytes: $1 MiB, unmap_deadline: 2m}, "
        "nvme: {bytes: $2 MiB, path: blocks}, policy: lru",
        chunk * chunks / MiB(1), chunk / MiB(1), chunk * chunks * 2 / MiB(1));
    return node_->Run(settings);
  }

  absl::StatusOr<RoundResult> Round() {
    RoundResult round;
    const auto before = AwaitQuiet(MonotonicNow() + kLongestSettling);
    if (!before.ok()) return before.status();
    const std::vector<int32_t> prompt =
        node_->client(0).RandomPrompt(options_.prefix_tokens + kQuestion);
    // Behind hits another question is asked: of the first one T0 may have the block that a step of
    // another size computed.
    std::vector<int32_t> behind = node_->client(0).RandomPrompt(kQuestion);
    behind.insert(behind.begin(), prompt.begin(), prompt.begin() + options_.prefix_tokens);
    for (size_t where = 0; where < kWheres; ++where) {
      absl::Status status;
      if (where == kT1 || where == kT3) status = Evict();
      if (status.ok() && where == kT3) status = MoveDown();
      if (!status.ok()) return status;
      auto measured = Ask(where == kComputed ? prompt : behind);
      if (!measured.ok()) return measured.status();
      round.push_back(*std::move(measured));
      if (where == kComputed) status = AwaitStored(prompt, before->dram);
      if (status.ok() && where == kT0 &&
          round.back().reply.cached_tokens != options_.prefix_tokens) {
        status = absl::InternalError(absl::StrCat("of a prompt asked twice T0 had ",
                                                  round.back().reply.cached_tokens, " tokens of ",
                                                  options_.prefix_tokens));
      }
      if (!status.ok()) return status;
    }
    if (!options_.cuda) {
      if (absl::Status status = Compute(behind, round[kT0].reply.tokens); !status.ok()) {
        return status;
      }
    }
    if (absl::Status status = Forget(); !status.ok()) return status;
    return round;
  }

  // On the CPU answers behind hits are also what the whole prompt's computation gives.
  absl::Status Compute(const std::vector<int32_t>& prompt, const std::vector<int32_t>& expected) {
    absl::Status status = Evict();
    if (status.ok()) status = Forget();
    if (!status.ok()) return status;
    const auto computed = Ask(prompt);
    if (!computed.ok()) return computed.status();
    if (computed->reply.cached_tokens == 0 && computed->reply.tokens == expected) {
      return absl::OkStatus();
    }
    return absl::InternalError(
        absl::StrCat("an answer behind a hit parts from the computed one at token ",
                     CommonTokens(computed->reply.tokens, expected), "; of the latter's prompt ",
                     computed->reply.cached_tokens, " tokens were not computed"));
  }

  absl::StatusOr<Measured> Ask(const std::vector<int32_t>& prompt) {
    const auto before = node_->BrokerStatus();
    if (!before.ok()) return before.status();
    auto reply = node_->client(0).AskPrompt(prompt, kAnswer);
    if (!reply.ok()) return reply.status();
    const auto after = node_->BrokerStatus();
    if (!after.ok()) return after.status();
    Measured measured{.reply = *std::move(reply)};
    const auto hits = [&](const char* tier) {
      const v1::TierMemory* const was = TierOf(*before, tier);
      const v1::TierMemory* const is = TierOf(*after, tier);
      if (was == nullptr || is == nullptr) return uint64_t{0};
      return is->tenants(0).hit_blocks() - was->tenants(0).hit_blocks();
    };
    measured.t1_blocks = hits("dram");
    measured.t3_blocks = hits("nvme");
    return measured;
  }

  // What the tiers are once nothing has moved for a while.
  struct Blocks {
    uint64_t dram = 0, nvme = 0;
  };
  absl::StatusOr<Blocks> AwaitQuiet(absl::Time deadline) {
    std::vector<uint64_t> last;
    absl::Time since = MonotonicNow();
    for (;;) {
      const auto status = node_->BrokerStatus();
      if (!status.ok()) return status.status();
      const v1::TierMemory* const dram = TierOf(*status, "dram");
      const v1::TierMemory* const nvme = TierOf(*status, "nvme");
      std::vector<uint64_t> now;
      for (const v1::TierMemory* tier : {dram, nvme}) {
        if (tier == nullptr) continue;
        now.insert(now.end(), {tier->used_bytes(), tier->queued_loads(), tier->queued_stores(),
                               tier->in_flight(), tier->tenants(0).blocks(),
                               tier->tenants(0).stored_blocks()});
      }
      if (now != last) since = MonotonicNow();
      last = std::move(now);
      if (dram != nullptr && nvme != nullptr && MonotonicNow() - since >= kQuiet) {
        return Blocks{dram->tenants(0).blocks(), nvme->tenants(0).blocks()};
      }
      if (MonotonicNow() > deadline) {
        return absl::DeadlineExceededError(absl::StrCat("the tiers are not at rest for ",
                                                        absl::FormatDuration(kQuiet), " within ",
                                                        absl::FormatDuration(kLongestSettling)));
      }
      absl::SleepFor(kPoll);
    }
  }

  // Until `done` holds of the tiers at rest; `again` is done before each further look.
  template <typename Done, typename Again>
  absl::Status Settle(const char* what, Done done, Again again) {
    const absl::Time deadline = MonotonicNow() + kLongestSettling;
    for (;;) {
      const auto blocks = AwaitQuiet(MonotonicNow() + kLongestSettling);
      if (!blocks.ok()) return blocks.status();
      if (done(*blocks)) return absl::OkStatus();
      if (MonotonicNow() > deadline) {
        return absl::DeadlineExceededError(
            absl::StrCat("waited ", absl::FormatDuration(kLongestSettling), " for ", what,
                         "; T1 has ", blocks->dram, " blocks, T3 ", blocks->nvme));
      }
      if (absl::Status status = again(); !status.ok()) return status;
    }
  }

  // What T1 had no room for is offered again when the prompt is asked again. `before`: blocks that
  // were there.
  absl::Status AwaitStored(const std::vector<int32_t>& prompt, uint64_t before) {
    return Settle(
        "the prompt's blocks in T1",
        [&](const Blocks& blocks) { return blocks.dram >= before + prefix_blocks_; },
        [&] { return node_->client(0).AskPrompt(prompt, 1).status(); });
  }

  // So that T0 has nothing of earlier requests: it keeps what was used last.
  absl::Status Evict() {
    const int32_t length = std::min(kEvictingPrompt, options_.prefix_tokens);
    const auto prompts = static_cast<int32_t>(capacity_tokens_ * 5 / 4 / length + 2);
    const auto answer = node_->client(0).Ask(prompts, length, 1);
    if (!answer.ok()) return answer.status();
    return AwaitQuiet(MonotonicNow() + kLongestSettling).status();
  }

  absl::Status MoveDown() {
    v1::TrimRequest request;
    request.set_tier(v1::TIER_DRAM);
    request.set_tenant(kTenant);
    v1::TrimResponse response;
    grpc::ClientContext context;
    context.set_deadline(GrpcTimeout(kCall));
    absl::Status status = FromGrpcStatus(node_->block_admin().Trim(&context, request, &response));
    if (!status.ok()) return status;
    // Where a disk brings blocks later than they are computed, it gets none.
    return Settle(
        "T1 to be empty", [](const Blocks& blocks) { return blocks.dram == 0; },
        [] { return absl::OkStatus(); });
  }

  absl::Status Forget() {
    v1::PurgeRequest request;
    request.set_tenant(kTenant);
    v1::PurgeResponse response;
    grpc::ClientContext context;
    context.set_deadline(GrpcTimeout(kCall));
    absl::Status status = FromGrpcStatus(node_->block_admin().Purge(&context, request, &response));
    if (!status.ok()) return status;
    // T0 still has blocks, which are offered again.
    return AwaitQuiet(MonotonicNow() + kLongestSettling).status();
  }

  // Whether the answer is to be T0's: another question is asked where nothing has the prefix, and
  // on a GPU steps of other sizes give other bits, with which two tokens may be as likely.
  bool MustAgree(const RoundResult& round, size_t where) const {
    return where > kT0 &&
           (!options_.cuda || round[where].reply.cached_tokens == options_.prefix_tokens);
  }

  Json Summary(size_t where) const {
    std::vector<double> times, cached, t1, t3;
    size_t agreeing = kAnswer;
    bool compared = true;
    bool wrong = false;
    for (const RoundResult& round : rounds_) {
      const Measured& measured = round[where];
      times.push_back(absl::ToDoubleMilliseconds(measured.reply.first_token));
      cached.push_back(static_cast<double>(measured.reply.cached_tokens));
      t1.push_back(static_cast<double>(measured.t1_blocks));
      t3.push_back(static_cast<double>(measured.t3_blocks));
      const size_t common = CommonTokens(round[kT0].reply.tokens, measured.reply.tokens);
      agreeing = std::min(agreeing, common);
      compared &= MustAgree(round, where);
      wrong |= common < kAnswer && MustAgree(round, where);
    }
    return {{"where", kNames[where]},
            {"ttft_ms", Median(times)},
            {"ttft_ms_least", *std::min_element(times.begin(), times.end())},
            {"ttft_ms_most", *std::max_element(times.begin(), times.end())},
            {"cached_tokens", Median(cached)},
            {"t1_blocks", Median(t1)},
            {"t3_blocks", Median(t3)},
            {"answer_tokens", kAnswer},
            {"agreeing_tokens", agreeing},
            {"compared", compared},
            {"wrong", wrong},
            {"all_ttft_ms", times}};
  }

  Json Result() const {
    Json places = Json::array();
    for (size_t where = 0; where < kWheres; ++where) {
      places.push_back(Summary(where));
      places.back()["times_sooner"] =
          places[0]["ttft_ms"].get<double>() / places.back()["ttft_ms"].get<double>();
    }
    Json result = {{"model", options_.model.empty() ? options_.shape : options_.model},
                   {"date", BenchDate()},
                   {"commit", BenchCommit()},
                   {"hardware", BenchHardware(options_.cuda ? options_.gpus : std::vector<int>())},
                   {"device", options_.cuda ? "cuda" : "cpu"},
                   {"prefix_tokens", options_.prefix_tokens},
                   {"question_tokens", kQuestion},
                   {"prefix_bytes", (block_bytes_ * static_cast<int64_t>(prefix_blocks_)).count()},
                   {"rounds", options_.rounds},
                   {"places", std::move(places)}};
    const auto status = node_->BrokerStatus();
    const v1::TierMemory* const nvme = status.ok() ? TierOf(*status, "nvme") : nullptr;
    if (nvme != nullptr) {
      result["nvme_load"] = {{"latency_s", nvme->load_latency_seconds()},
                             {"bytes_per_s", nvme->load_bytes_per_second()}};
    }
    return result;
  }

  const BenchPrefixOptions& options_;
  const Terminal& terminal_;
  const Bytes slab_;
  const uint64_t prefix_blocks_;
  int64_t capacity_tokens_ = 0;  // of T0
  Bytes block_bytes_;            // of all ranks
  std::unique_ptr<TenantNode> node_;
  std::vector<RoundResult> rounds_;
};

std::string Decision(const Json& place, int64_t prefix) {
  const auto cached = place["cached_tokens"].get<int64_t>();
  if (place["where"] == kNames[kT0]) return "found";
  if (cached == prefix) return "loaded";
  return cached == 0 ? "computed" : absl::StrCat("loaded ", cached, ", computed the rest");
}

std::string Table(const Json& result) {
  const auto prefix = result["prefix_tokens"].get<int64_t>();
  TextTable table({"PREFIX IN", ">TTFT MS", ">LEAST", ">MOST", ">TIMES SOONER", ">FROM T1",
                   ">FROM T3", "THE WORKER", "ANSWER"});
  for (const Json& place : result["places"]) {
    const auto number = [&](const char* key, const char* format) {
      return absl::StrFormat(*absl::ParsedFormat<'f'>::New(format), place[key].get<double>());
    };
    const auto agreeing = place["agreeing_tokens"].get<size_t>();
    std::string answer = place["compared"].get<bool>() ? "as T0's" : "";
    if (place["wrong"].get<bool>()) answer = absl::StrCat("other from token ", agreeing, ": WRONG");
    table.AddRow({place["where"].get<std::string>(), number("ttft_ms", "%.1f"),
                  number("ttft_ms_least", "%.1f"), number("ttft_ms_most", "%.1f"),
                  number("times_sooner", "%.2f"), number("t1_blocks", "%.0f"),
                  number("t3_blocks", "%.0f"), Decision(place, prefix), answer});
  }
  return table.ToString();
}

}  // namespace

int RunBenchPrefix(BenchPrefixOptions options, const Terminal& terminal) {
  if (options.binaries.empty()) options.binaries = DefaultBinaries();
  if (options.gpus.empty()) {
    return Fail(terminal, absl::InvalidArgumentError("--gpus needs at least one number"));
  }
  if (options.prefix_tokens % kBlockTokens != 0) {
    return Fail(terminal,
                absl::InvalidArgumentError(absl::StrCat("--prefix: expected a multiple of ",
                                                        kBlockTokens, ", the tokens of a block")));
  }
  const auto result = PrefixBench(options, terminal).Run();
  if (!result.ok()) return Fail(terminal, result.status());
  if (!options.json_file.empty()) {
    absl::Status status = WriteFileAtomically(options.json_file, result->dump(1) + "\n");
    if (!status.ok()) return Fail(terminal, status);
  }
  terminal.out << Table(*result) << std::flush;
  const Json& places = (*result)["places"];
  const bool wrong = std::any_of(places.begin(), places.end(),
                                 [](const Json& place) { return place["wrong"].get<bool>(); });
  return wrong ? kFailed : kDone;
}

}  // namespace palimpsest::palctl
