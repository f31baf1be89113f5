// Checks on the GPU machine that KV goes to host memory and back, to memory of a block store as
// well: bytes, speed against the link, and the tokens of an engine whose sequences are swapped all
// the time.
//
//   swap_check [--device N] [--gemm-cache FILE]
//
// Prints lines as tools/gpu_check/check_report.h has them; exits with 1 if a check failed.
#include <cuda_runtime_api.h>

#include <algorithm>
#include <cmath>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "CLI/CLI.hpp"
#include "common/cuda/driver.h"
#include "common/cuda/status.h"
#include "tools/gpu_check/check_report.h"
#include "tools/gpu_check/timing.h"
#include "worker/compute/cuda/checked_region.h"
#include "worker/compute/cuda/cuda_block_copier.h"
#include "worker/compute/cuda/cuda_swap_copier.h"
#include "worker/compute/cuda/gpu_model.h"
#include "worker/compute/cuda/swap_store_check.h"
#include "worker/core/swap_gate.h"
#include "worker/memory/fake_memory_client.h"
#include "worker/server/engine.h"

namespace palimpsest::cuda {
namespace {

using Direction = SwapTransfer::Direction;

std::vector<SwapMove> Moves(const std::vector<uint32_t>& blocks,
                            const std::vector<uint32_t>& slots) {
  std::vector<SwapMove> moves;
  for (size_t i = 0; i < blocks.size(); ++i) {
    moves.push_back({BlockId(blocks[i]), SwapSlot(slots[i])});
  }
  return moves;
}

void Finish(SwapCopier& copier, Direction direction, std::vector<SwapMove> moves,
            bool awaited = false) {
  static uint64_t id = 0;
  copier.Start(
      {.id = SwapId(++id), .direction = direction, .awaited = awaited, .moves = std::move(moves)});
  copier.AwaitAll();
  for (const SwapEnded& ended : copier.TakeEnded()) OkOrDie(ended.status);
}

void CheckBytes(CheckReport& report, Region& region, SwapCopier& copier) {
  std::mt19937 random(3);
  std::vector<uint32_t> blocks = Numbers(1, 24);
  std::vector<uint32_t> slots = Numbers(0, 24);
  bool same = true;
  for (int round = 0; round < 4; ++round) {
    for (uint32_t block : blocks) {
      region.Write(block, Pattern(region.memory().kv_block_bytes, 100 * round + block));
    }
    Finish(copier, Direction::kOut, Moves(blocks, slots));
    // Back to other places: in order, or each anywhere.
    std::vector<uint32_t> places = Numbers(40, blocks.size());
    if (round % 2 == 1) std::shuffle(places.begin(), places.end(), random);
    Finish(copier, Direction::kIn, Moves(places, slots));
    for (size_t i = 0; i < blocks.size(); ++i) {
      same = same && region.Read(places[i]) ==
                         Pattern(region.memory().kv_block_bytes, 100 * round + blocks[i]);
    }
    if (round % 2 == 0) std::shuffle(slots.begin(), slots.end(), random);
  }
  report.Verify("swap.bytes", same, "24 blocks out and to other places");
}

void MeasureShape(CheckReport& report, const CudaContextPtr& context, int device,
                  const std::string& name, Bytes block, int layers) {
  Region region(context, device, 64, block);
  const size_t count = static_cast<size_t>(region.blocks()) - 2;
  const CudaSwapCopier::Options options = {.slots = static_cast<int32_t>(count), .layers = layers};
  auto copier = ValueOrDie(CudaSwapCopier::Create({{context, region.memory()}}, options));
  if (name == "llama3-8b") CheckBytes(report, region, *copier);
  const Bytes bytes = block * static_cast<int64_t>(count);
  std::vector<uint32_t> shuffled = Numbers(1, count);
  std::mt19937 random(1);
  std::shuffle(shuffled.begin(), shuffled.end(), random);
  const double link_in = LinkRate(region, true, bytes);
  const double link_out = LinkRate(region, false, bytes);
  const auto rate = [&](SwapCopier& by, Direction direction, const std::vector<SwapMove>& moves,
                        bool awaited) {
    std::vector<absl::Duration> times;
    for (int i = 0; i < 5; ++i) {
      times.push_back(Timed([&] { Finish(by, direction, moves, awaited); }));
    }
    return GigabytesPerSecond(bytes, Median(times));
  };
  const std::string size = absl::StrCat(bytes.ToString(), ", ", count, " blocks");
  for (const bool scattered : {false, true}) {
    const std::vector<SwapMove> moves =
        Moves(scattered ? shuffled : Numbers(1, count), Numbers(0, count));
    const auto measure = [&](const std::string& way, Direction direction, bool awaited) {
      const std::string what =
          absl::StrCat("swap.", name, way, scattered ? ".scattered" : ".neighbours");
      const double found = rate(*copier, direction, moves, awaited);
      report.Inform(what, found, "GB/s", size);
      report.Measure(what + ".share", found / (direction == Direction::kIn ? link_in : link_out),
                     "of the link", CheckReport::Limit::kAtLeast, 0.85);
    };
    measure(".out", Direction::kOut, false);
    // Layer by layer, for steps that follow; then in whole blocks.
    measure(".in", Direction::kIn, true);
    measure(".in_blocks", Direction::kIn, false);
  }
  {
    // As with a driver that has no batches.
    CudaDriver driver = context->driver();
    driver.cuMemcpyBatchAsync = nullptr;
    const CudaContextPtr old = ValueOrDie(CudaContext::Open(driver, device));
    auto singly = ValueOrDie(CudaSwapCopier::Create({{old, region.memory()}}, options));
    const std::vector<SwapMove> moves = Moves(shuffled, Numbers(0, count));
    for (const bool awaited : {true, false}) {
      report.Inform(
          absl::StrCat("swap.", name, awaited ? ".in" : ".in_blocks", ".scattered.singly"),
          rate(*singly, Direction::kIn, moves, awaited) / link_in, "of the link");
    }
  }
  // Both directions at once, on disjoint blocks.
  const size_t half = count / 2;
  const absl::Duration both = Timed([&] {
    copier->Start({.id = SwapId(1u << 30),
                   .direction = Direction::kOut,
                   .moves = Moves(Numbers(1, half), Numbers(0, half))});
    copier->Start({.id = SwapId((1u << 30) + 1),
                   .direction = Direction::kIn,
                   .moves = Moves(Numbers(1 + half, half), Numbers(half, half))});
    copier->AwaitAll();
  });
  report.Inform(absl::StrCat("swap.", name, ".both"), GigabytesPerSecond(bytes, both), "GB/s");
}

// Says that KV is back and brings none: what the comparison of tokens must find.
class ForgetfulCopier final : public SwapCopier {
 public:
  explicit ForgetfulCopier(SwapCopier* inner) : inner_(inner) {}
  void Start(SwapTransfer transfer) override {
    if (transfer.direction == Direction::kIn) {
      transfer.direction = Direction::kOut;
      for (SwapMove& move : transfer.moves) move.slot = transfer.moves.front().slot;
    }
    inner_->Start(std::move(transfer));
  }
  std::vector<SwapEnded> TakeEnded() override { return inner_->TakeEnded(); }
  void AwaitAll() override { inner_->AwaitAll(); }
  void SetWakeup(std::function<void()> wakeup) override { inner_->SetWakeup(std::move(wakeup)); }
  absl::Duration waited() const override { return inner_->waited(); }
  absl::Status AwaitLayer(int) override { return absl::OkStatus(); }

 private:
  SwapCopier* const inner_;
};

class NoBytes : public TokenBytes {
 public:
  absl::string_view BytesOf(TokenId) const override { return "x"; }
};

ModelConfig SmallLlama() {
  ModelConfig c;
  c.architecture = "LlamaForCausalLM";
  c.num_layers = 8;
  c.hidden_size = 1024;
  c.num_heads = 8;
  c.num_kv_heads = 4;
  c.head_dim = 128;
  c.intermediate_size = 2816;
  c.vocab_size = 8192;
  c.rope_theta = 500000;
  c.max_position = 4096;
  return c;
}

struct Answers {
  std::vector<std::vector<SampledToken>> tokens;
  SchedulerCounters counters;
  int64_t eager_steps = 0;
};

// 48 requests through an engine with `blocks` KV blocks, of which others are preempted.
Answers Serve(const GpuModel& model, int32_t blocks, int32_t swap_blocks, int32_t overlap,
              SwapCopier* swap) {
  constexpr int32_t kBlockTokens = 16;
  const Bytes block = model.memory(0).kv_block_bytes;
  // The engine's slabs: the memory client only plays the broker, the GPU's memory stays mapped.
  FakeMemoryClient memory(Bytes(block.count()), blocks);
  std::unique_ptr<SwapGate> gate;
  if (swap != nullptr) {
    gate = std::make_unique<SwapGate>(&memory.gate(), swap, 1, model.config().num_layers);
  }
  const auto runner = ValueOrDie(
      model.NewRunner(gate != nullptr ? static_cast<ParameterGate*>(gate.get()) : &memory.gate()));
  const CudaContextPtr context =
      ValueOrDie(CudaContext::Open(*ValueOrDie(CudaDriver::Load()), model.devices().front()));
  const auto copier = ValueOrDie(CudaBlockCopier::Create({{context, model.memory(0)}}));
  EngineOptions options;
  SchedulerConfig& scheduler = options.scheduler;
  scheduler.geometry = {.slab_bytes = block,
                        .block_bytes = block,
                        .region_slabs = blocks,
                        .block_tokens = kBlockTokens};
  scheduler.max_kv_slabs = blocks;
  scheduler.vocab_size = model.config().vocab_size;
  scheduler.max_sequence_tokens = 1024;
  scheduler.max_batch_sequences = 24;
  scheduler.max_step_tokens = 512;
  scheduler.pipeline_depth = runner->pipeline_depth();
  scheduler.swap_blocks = swap_blocks;
  options.swap_overlap_blocks = overlap;
  options.kv_target = {.low_water_slabs = 1, .high_water_slabs = 2, .max_slabs = blocks};
  OkOrDie(options.Validate());
  Metrics metrics(MetricProcess::kWorker);
  EngineMetrics engine_metrics(metrics);
  NoBytes token_bytes;
  EngineParts parts{&memory,      runner.get(),    copier.get(),
                    &token_bytes, &engine_metrics, &Clock::Real()};
  parts.swap = swap;
  Engine engine(options, parts);
  memory.Connect();
  memory.GrantKv(blocks);
  std::mt19937 random(11);
  std::vector<std::shared_ptr<GenerationStream>> streams;
  for (int i = 0; i < 48; ++i) {
    SequenceRequest request;
    for (int n = 60 + random() % 200; n > 0; --n) {
      request.prompt.push_back(static_cast<TokenId>(random() % scheduler.vocab_size));
    }
    request.params.temperature = 0;
    request.params.ignore_eos = true;
    request.params.max_tokens = 150 + static_cast<int32_t>(random() % 150);
    request.params.logprobs = 2;
    streams.push_back(ValueOrDie(engine.Submit(std::move(request), [] {})));
  }
  const absl::Time deadline = MonotonicNow() + absl::Seconds(60);
  while (engine.AwaitDrained(absl::ZeroDuration()) > 0) {
    if (MonotonicNow() > deadline) Die(absl::DeadlineExceededError("the requests do not end"));
    if (!engine.RunOnce() && swap != nullptr) swap->AwaitAll();
  }
  Answers answers;
  for (const auto& stream : streams) {
    GenerationStream::Batch batch = stream->Take();
    if (!batch.end.has_value() || !batch.end->status.ok()) {
      Die(batch.end.has_value() ? batch.end->status : absl::InternalError("no end"));
    }
    answers.tokens.push_back(std::move(batch.tokens));
  }
  answers.counters = engine.Stats().counters;
  answers.eager_steps = runner->stats().eager_steps;
  return answers;
}

struct Comparison {
  int same = 0;
  int close = 0;       // parted where the two best tokens were close
  int different = 0;   // parted elsewhere, or with other probabilities before
  size_t tokens = 0;   // compared
  double largest = 0;  // difference of a log-probability before they part
};

Comparison Compare(const Answers& a, const Answers& b) {
  // The runner's logits in bf16 differ by this much between batches of other sizes.
  constexpr double kMargin = 0.06;
  Comparison result;
  for (size_t i = 0; i < a.tokens.size(); ++i) {
    const auto& x = a.tokens[i];
    const auto& y = b.tokens[i];
    size_t t = 0;
    double largest = 0;
    for (; t < x.size() && t < y.size() && x[t].token == y[t].token; ++t) {
      largest = std::max(largest, std::abs(double{x[t].logprob} - y[t].logprob));
    }
    result.tokens += t;
    result.largest = std::max(result.largest, largest);
    const bool ended = t == x.size() && t == y.size();
    const bool near =
        ended || (t < x.size() && x[t].top.size() > 1 &&
                  std::abs(double{x[t].top[0].second} - x[t].top[1].second) < kMargin);
    if (!near || largest > kMargin) {
      ++result.different;
    } else {
      ++(ended ? result.same : result.close);
    }
  }
  return result;
}

void CheckTokens(CheckReport& report, int device, const std::string& gemm_cache) {
  CudaRunnerOptions options;
  options.device = device;
  options.max_step_tokens = 512;
  options.max_sequences = 24;
  options.gemm_cache_file = gemm_cache;
  constexpr int32_t kPlenty = 1400;
  constexpr int32_t kScarce = 220;
  const auto model = ValueOrDie(GpuModel::Create(SmallLlama(), (kPlenty + 1) * 16, options));
  OkOrDie(model->FillRandom(5));
  const CudaContextPtr context =
      ValueOrDie(CudaContext::Open(*ValueOrDie(CudaDriver::Load()), device));
  const Answers calm = Serve(*model, kPlenty, 0, 0, nullptr);
  report.Verify("swap.tokens.calm", calm.counters.preemptions == 0);
  const auto compare = [&](const std::string& name, const Answers& answers, bool expect_same) {
    const Comparison c = Compare(calm, answers);
    report.Verify(
        absl::StrCat("swap.tokens.", name), expect_same ? c.different == 0 : c.different > 0,
        absl::StrCat(c.same, " requests alike, ", c.close,
                     " parted where the two best were close, ", c.different,
                     " differ; log-probabilities of the ", c.tokens, " tokens up to then within ",
                     c.largest, "; ", answers.counters.preemptions, " preemptions, ",
                     answers.counters.swapped_preemptions, " swapped, ",
                     answers.counters.blocks_swapped_in, " blocks came back, ", answers.eager_steps,
                     " eager steps"));
  };
  compare("recompute", Serve(*model, kScarce, 0, 0, nullptr), true);
  for (const int32_t overlap : {0, 1000}) {
    auto swap = ValueOrDie(CudaSwapCopier::Create(
        {{context, model->memory(0)}}, {.slots = 1000, .layers = model->config().num_layers}));
    const Answers answers = Serve(*model, kScarce, 1000, overlap, swap.get());
    const std::string name = overlap > 0 ? "joining" : "returned";
    compare(name, answers, true);
    report.Verify(absl::StrCat("swap.tokens.", name, ".swapped"),
                  answers.counters.blocks_swapped_in > 0 &&
                      answers.counters.swapped_preemptions == answers.counters.preemptions);
  }
  auto swap = ValueOrDie(CudaSwapCopier::Create(
      {{context, model->memory(0)}}, {.slots = 1000, .layers = model->config().num_layers}));
  ForgetfulCopier forgetful(swap.get());
  compare("forgetful", Serve(*model, kScarce, 1000, 1000, &forgetful), false);
}

int Run(int device, const std::string& gemm_cache) {
  CheckReport report;
  OkOrDie(CudaStatus(cudaSetDevice(device), "choose the GPU"));
  const CudaContextPtr context =
      ValueOrDie(CudaContext::Open(*ValueOrDie(CudaDriver::Load()), device));
  OkOrDie(context->MakeCurrent());
  MeasureShape(report, context, device, "llama3-8b", KiB(64) * 32, 32);
  MeasureShape(report, context, device, "opt-13b", KiB(320) * 40, 40);
  CheckSwapStore(report, context, device);
  CheckTokens(report, device, gemm_cache);
  return report.exit_status();
}

}  // namespace
}  // namespace palimpsest::cuda

int main(int argc, char** argv) {
  CLI::App app("Checks KV that goes to host memory and back, on a GPU.");
  int device = 0;
  app.add_option("--device", device, "The GPU");
  std::string gemm_cache;
  app.add_option("--gemm-cache", gemm_cache, "Where algorithms of matrix products are kept");
  CLI11_PARSE(app, argc, argv);
  return palimpsest::cuda::Run(device, gemm_cache);
}
