#include "tools/palctl/replay_options.h"

#include <CLI/CLI.hpp>
#include <string>
#include <vector>

#include "tools/replay/client_hints.h"
#include "tools/replay/replayer.h"
#include "tools/replay/trace_formats.h"

namespace palimpsest::palctl {
namespace {

void AddServe(CLI::App& replay, ReplayOptions& options, double& patience_seconds) {
  CLI::Option* serve = replay.add_flag(
      "--serve", options.serve,
      "sends the requests to the node that runs, too, whether or not earlier ones have been "
      "answered; tokens are made up so that prompts have in common what they have in the trace");
  replay.add_option("--tenant", options.tenant, "whose token and models to use")->needs(serve);
  replay.add_option("--model", options.model, "needed if the tenant has several")->needs(serve);
  replay.add_option("--requests", options.requests, "only the first so many that fit the model")
      ->needs(serve)
      ->check(CLI::PositiveNumber);
  replay.add_option("--speed", options.speed, "requests come so many times as fast as recorded")
      ->needs(serve)
      ->check(CLI::Range(1e-3, 1e6))
      ->capture_default_str();
  replay
      .add_option("--block-tokens", options.block_tokens,
                  "tokens that a block of the trace becomes, so that prompts fit a smaller model "
                  "(default: as many as in the trace)")
      ->needs(serve)
      ->check(CLI::Range(int64_t{1}, int64_t{4096}));
  replay.add_option("--most-output", options.most_output, "tokens of an answer at most")
      ->needs(serve)
      ->check(CLI::Range(int64_t{1}, int64_t{1} << 20))
      ->capture_default_str();
  replay
      .add_option("--salt", options.salt,
                  "other tokens for each number; a node that has seen the same ones has their KV "
                  "(default: a random one)")
      ->needs(serve);
  replay
      .add_option("--kv-block-tokens", options.kv_block_tokens,
                  "tokens of a block of the node, as its broker is configured")
      ->needs(serve)
      ->check(CLI::Range(int64_t{1}, int64_t{4096}))
      ->capture_default_str();
  replay.add_option("--timeout", patience_seconds, "seconds that the last request may take")
      ->needs(serve)
      ->check(CLI::Range(0.1, 86400.0))
      ->capture_default_str();
}

}  // namespace

void AddReplay(CLI::App& app, ReplayOptions& options, double& patience_seconds) {
  CLI::App* replay = app.add_subcommand(
      "replay",
      "runs a recorded stream of requests through a cache of KV blocks under a policy, beside the "
      "infinite cache, Belady's optimum and LRU; needs no node but with --serve");
  replay->add_option("--trace", options.file, "what was recorded; may be packed by gzip")
      ->required()
      ->type_name("FILE");
  replay->add_option("--format", options.format, "of the file")
      ->required()
      ->check(CLI::IsMember(replay::TraceFormats()));
  replay->add_option("--policy", options.policy, "which blocks go")
      ->check(CLI::IsMember(replay::ReplayPolicies()))
      ->capture_default_str();
  replay
      ->add_option("--blocks", options.blocks,
                   "size of the cache (default with --tiers: of all of them together)")
      ->check(CLI::Range(uint64_t{1}, uint64_t{replay::kMostBlocks}));
  replay->add_flag("--leaves-first", options.leaves_first,
                   "a block goes after those behind it, as in the broker; otherwise blocks are as "
                   "if they had nothing to do with each other, as in papers");
  replay
      ->add_option("--history", options.history,
                   "blocks that are remembered though they are not cached, with leaves first")
      ->check(CLI::Range(uint64_t{0}, uint64_t{replay::kMostBlocks}))
      ->capture_default_str();
  replay->add_option("--seed", options.seed, "claude-code: which merging of the sessions")
      ->capture_default_str();
  replay
      ->add_option("--starts", options.starts_file,
                   "claude-code: when each session starts (default: claude_code_starts.csv beside "
                   "the trace)")
      ->type_name("FILE");
  replay
      ->add_option("--token-bytes", options.token_bytes,
                   "KV of a token, to show bytes; the default is Llama-3-8B's in bf16")
      ->check(CLI::Range(uint64_t{1}, uint64_t{1} << 24))
      ->capture_default_str();
  std::vector<std::string> hints;
  for (const auto& [name, value] : replay::HintNames()) hints.push_back(name);
  replay
      ->add_option("--hints", options.hints,
                   "what clients say of their requests, taken from the trace's future: whether it "
                   "was the last turn, or that and when the next one comes")
      ->check(CLI::IsMember(hints))
      ->capture_default_str();
  replay
      ->add_option(
          "--tiers", options.tiers_file,
          "YAML with the sizes and costs of a node's tiers: runs the trace through them as "
          "well, with hits by tier, times to the first token, bytes moved and prefetches")
      ->type_name("FILE");
  replay->callback([&options] {
    if (options.blocks == 0 && options.tiers_file.empty()) {
      throw CLI::RequiredError("--blocks or --tiers");
    }
  });
  replay->add_flag("--json", options.json, "everything as JSON, rates from 0 to 1");
  AddServe(*replay, options, patience_seconds);
}

}  // namespace palimpsest::palctl
