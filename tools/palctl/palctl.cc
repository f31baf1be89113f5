#include <CLI/CLI.hpp>
#include <functional>
#include <sstream>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "broker/core/sizing/kv_sizing.h"
#include "common/file.h"
#include "common/kv_format.h"
#include "tools/palctl/bench_commands.h"
#include "tools/palctl/cache_options.h"
#include "tools/palctl/commands.h"
#include "tools/palctl/replay_options.h"
#include "tools/palctl/tier_names.h"

namespace palimpsest::palctl {
namespace {

constexpr char kAbout[] =
    "Shows and steers a running Palimpsest node, and asks its models.\n"
    "\n"
    "The node is found through a node file: --node, or the first of deploy/local/node.yaml,\n"
    "~/.config/palimpsest/node.yaml and ~/.cache/palimpsest/local/node.yaml (tools/quickstart)\n"
    "whose broker socket exists:\n"
    "  broker: broker.sock                    # the broker's control socket\n"
    "  operator: broker-state/operator.sock   # for doctor, limit, trim, purge and events: in "
    "its state_dir\n"
    "  router: 127.0.0.1:9100\n"
    "  tokens: {alpha: secrets/alpha.token}   # files that hold the tenants' bearer tokens\n"
    "  tls_ca: ca.pem                         # if the router listens with TLS (--tls-ca)\n"
    "  server_name: router.example            # the name in its certificate (--server-name)\n"
    "Paths in it are relative to its folder. Flags override it.\n"
    "\n"
    "Begin with: palctl status; palctl generate --tenant alpha --chat \"Who are you?\"\n"
    "palctl COMMAND --help says more.\n"
    "\n"
    "Exit status: 0 done; 1 refused or failed; 2 wrong usage or argument; 3 nobody listens there,\n"
    "or no worker is available; 130 interrupted.";

// What the command line says; each subcommand fills its own part.
struct CommandLine {
  std::string node_file;
  std::string broker;
  std::string operator_socket;
  std::string router;
  std::string token_file;
  std::string tls_ca;
  std::string server_name;
  StatusOptions status;
  RemapOptions remap;
  TopOptions top;
  double top_seconds = 1;
  GenerateOptions generate;
  bool raw = false;
  double generate_seconds = 600;
  TokenizeOptions tokenize;
  HintOptions hint;
  EventsOptions events;
  DrainOptions drain;
  double drain_seconds = 60;
  DoctorOptions doctor;
  double doctor_seconds = 60;
  LimitOptions limit;
  TrimOptions trim;
  PurgeOptions purge;
  double purge_seconds = 60;
  BenchCommandLine bench;
  PlanOptions plan;
  ReplayOptions replay;
  double replay_seconds = 600;
};

void AddStatus(CLI::App& app, CommandLine& line) {
  CLI::App* status =
      app.add_subcommand("status", "who holds which slabs, what moves, and the router's queues");
  status->add_flag("--json", line.status.json, "everything as JSON, finished transfers included");
  CLI::App* top = app.add_subcommand(
      "top",
      "the status, again and again; ends on q or Ctrl-C. Plain snapshots when the output "
      "is not a terminal");
  top->add_option("--interval", line.top_seconds, "seconds between two looks")
      ->check(CLI::Range(0.1, 3600.0))
      ->capture_default_str();
  top->add_option("--count", line.top.count, "end after this many looks; 0: never")
      ->check(CLI::NonNegativeNumber)
      ->capture_default_str();
}

void AddRemap(CLI::App& app, RemapOptions& options) {
  CLI::App* remap = app.add_subcommand(
      "remap", "by which rules memory was taken from whom, since the broker started");
  remap->add_flag("--explain", options.explain,
                  "the last decisions one by one, with the numbers that decided them");
  remap->add_option("--tenant", options.tenant, "only decisions that concern this tenant");
  remap->add_option("--last", options.last, "how many decisions at most")
      ->check(CLI::Range(1, 1024))
      ->capture_default_str();
  remap->add_flag("--json", options.json, "{decisions, totals}, every field of both");
}

void AddGenerate(CLI::App& app, CommandLine& line) {
  GenerateOptions& options = line.generate;
  CLI::App* generate =
      app.add_subcommand("generate", "asks a model; the text streams to standard output");
  generate->add_option("prompt", options.prompts, "one or more prompts");
  generate->add_option("--tenant", options.tenant, "whose token and models to use");
  generate->add_option("--model", options.model, "needed if the tenant has several");
  CLI::Option* chat = generate->add_flag("--chat", options.chat,
                                         "send the prompt as a user's message (chat template)");
  generate->add_flag("--raw", line.raw, "send the prompt as plain text (the default)")
      ->excludes(chat);
  generate
      ->add_option(
          "--earlier", options.earlier_file,
          "with --chat: the conversation so far, [{\"role\": \"user\", \"content\": TEXT}, "
          "...]")
      ->needs(chat)
      ->type_name("FILE");
  generate->add_option("--max-tokens", options.max_tokens, "most tokens to generate");
  generate->add_option("--temperature", options.temperature, "0 is greedy; the default is 1");
  generate->add_option("--top-k", options.top_k, "keep the k most likely tokens");
  generate->add_option("--top-p", options.top_p, "keep tokens up to this probability mass");
  generate->add_option("--min-p", options.min_p,
                       "drop tokens less likely than this times the best");
  generate->add_option("--repetition-penalty", options.repetition_penalty, "1 is none");
  generate->add_option("--seed", options.seed, "the same seed gives the same text");
  generate->add_option("--stop", options.stop, "end before this text; may be repeated")
      ->allow_extra_args(false);
  generate->add_flag("--ignore-eos", options.ignore_eos, "go on after the end-of-sequence token");
  generate->add_option("--logprobs", options.logprobs,
                       "print log-probabilities, with this many alternatives");
  AddRequestHints(*generate, options);
  generate->add_flag("--json", options.json,
                     "one line of JSON per answer: tenant, prompt, text, token_ids, finish_reason, "
                     "usage, request_id, ttft_seconds, seconds");
  generate->add_flag("--stream", options.stream,
                     "with --json: lines {\"delta\": TEXT} as the text comes");
  generate->add_option("--prompts-file", options.prompts_file, "more prompts, one per line");
  generate->add_option("--concurrency", options.concurrency, "how many prompts to ask at a time")
      ->check(CLI::Range(1, 1024))
      ->capture_default_str();
  generate->add_option("--timeout", line.generate_seconds, "seconds for each answer")
      ->check(CLI::Range(0.001, 86400.0))
      ->capture_default_str();
}

void AddPlan(CLI::App& app, PlanOptions& options) {
  CLI::App* plan = app.add_subcommand(
      "plan",
      "how much KV cache a model needs, and how many sequences fit; from its config.json alone, no "
      "node is asked");
  plan->add_option("--config", options.config_file, "the model's config.json (Hugging Face)")
      ->required()
      ->type_name("FILE");
  plan->add_option("--memory", options.memories,
                   "memory for KV, of one GPU: 80GiB; may be repeated as NAME=SIZE, one for each "
                   "tier")
      ->required()
      ->allow_extra_args(false)
      ->type_name("SIZE");
  plan->add_option("--tokens", options.tokens, "length of a sequence")
      ->required()
      ->check(CLI::Range(int64_t{1}, KvSizing::kMaxTokens));
  plan->add_option("--tp", options.ranks,
                   "GPUs that share the model (tensor parallel); sizes are then those of each")
      ->check(CLI::Range(1, 1024))
      ->capture_default_str();
  plan->add_option("--kv-dtype", options.kv_dtype, absl::StrJoin(KvFormatNames(), ", "))
      ->capture_default_str();
  plan->add_option("--kv-scale-bytes", options.kv_scale_bytes,
                   "bytes of a scale in the cache, with its zero point (default: the format's)")
      ->check(CLI::Range(0, 64));
  plan->add_option("--kv-scale-group", options.kv_scale_group,
                   "numbers that share a scale; 0: those of a head (default: the format's)")
      ->check(CLI::Range(0, 1 << 14));
  plan->add_option("--block-tokens", options.block_tokens, "tokens of a block")
      ->check(CLI::Range(int64_t{1}, KvSizing::kMaxBlockTokens))
      ->capture_default_str();
  plan->add_flag(
      "--json", options.json,
      "{bytes_per_token_layer, bytes_per_sequence, max_sequences, mha_..., groups, memory}");
}

void AddTiers(CLI::App& app, CommandLine& line) {
  CLI::App* doctor = app.add_subcommand(
      "doctor", "sends blocks through every tier below T0, compares what comes back, shows rates");
  doctor->add_option("--block", line.doctor.block, "size of a block")
      ->type_name("SIZE")
      ->capture_default_str();
  doctor->add_option("--blocks", line.doctor.blocks, "blocks through each tier, at most 32 MiB")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  doctor->add_option("--timeout", line.doctor_seconds, "seconds for each tier")
      ->check(CLI::Range(0.1, 600.0))
      ->capture_default_str();
  doctor->add_flag("--json", line.doctor.json, "{tiers: [{tier, name, error, blocks, rates}]}");
  CLI::App* limit = app.add_subcommand(
      "limit", "changes how much of a tier may be used, until the broker restarts");
  limit->add_option("--tier", line.limit.tier, "which tier")
      ->check(CLI::IsMember(TierNames()))
      ->required();
  limit->add_option("--tenant", line.limit.tenant, "by one tenant (default: all together)");
  limit->add_option("--bytes", line.limit.bytes, "the limit")->type_name("SIZE")->required();
  CLI::App* trim = app.add_subcommand(
      "trim", "makes room now: blocks worth least go, to the next tier that wants them");
  trim->add_option("--tier", line.trim.tier, "which tier (default: all)")
      ->check(CLI::IsMember(TierNames()));
  trim->add_option("--tenant", line.trim.tenant, "whose blocks (default: everybody's)");
  trim->add_option("--keep", line.trim.keep, "what may stay, of each tenant in each tier")
      ->type_name("SIZE")
      ->capture_default_str();
  CLI::App* purge = app.add_subcommand(
      "purge", "forgets all blocks of a tenant in every tier, also over a restart");
  purge->add_option("--tenant", line.purge.tenant, "which tenant")->required();
  purge->add_option("--timeout", line.purge_seconds, "seconds to wait; the purge goes on")
      ->check(CLI::Range(0.1, 600.0))
      ->capture_default_str();
}

void AddOthers(CLI::App& app, CommandLine& line) {
  CLI::App* tokenize = app.add_subcommand("tokenize", "prints the token ids of a text");
  tokenize->add_option("text", line.tokenize.text)->required();
  tokenize->add_option("--tenant", line.tokenize.tenant, "whose token and models to use");
  tokenize->add_option("--model", line.tokenize.model, "needed if the tenant has several");
  tokenize->add_flag("--chat", line.tokenize.chat, "as a user's message (chat template)");
  tokenize->add_flag("--json", line.tokenize.json, "{\"token_ids\": [...]}");
  CLI::App* drain = app.add_subcommand(
      "drain", "stops a tenant's workers from taking requests and waits until they are empty");
  drain->add_option("--tenant", line.drain.tenant, "which tenant")->required();
  drain->add_option("--timeout", line.drain_seconds, "seconds to wait")
      ->check(CLI::Range(0.1, 600.0))
      ->capture_default_str();
  AddBenchCommands(app, line.bench);
}

absl::StatusOr<NodeAddresses> FindNode(const CommandLine& line) {
  NodeAddresses addresses;
  const std::string file = line.node_file.empty() ? DefaultNodeFile() : line.node_file;
  if (!file.empty()) {
    absl::StatusOr<NodeAddresses> read = ReadNodeFile(file);
    if (!read.ok()) return read.status();
    addresses = *std::move(read);
  }
  if (!line.broker.empty()) addresses.broker_socket = line.broker;
  if (!line.operator_socket.empty()) addresses.operator_socket = line.operator_socket;
  if (!line.router.empty()) addresses.router = line.router;
  if (!line.tls_ca.empty()) addresses.tls_ca = line.tls_ca;
  if (!line.server_name.empty()) addresses.server_name = line.server_name;
  if (!addresses.tls_ca.empty()) {
    absl::StatusOr<std::string> roots = ReadFile(addresses.tls_ca, MiB(1));
    if (!roots.ok()) return roots.status();
    if (roots->empty()) {
      return absl::InvalidArgumentError(
          absl::StrCat(addresses.tls_ca, " is empty: expected certificates in PEM"));
    }
    addresses.tls_roots = *std::move(roots);
  } else if (!addresses.server_name.empty()) {
    return absl::InvalidArgumentError(
        "--server-name needs --tls-ca: it is the name in a certificate");
  }
  if (!line.token_file.empty()) {
    absl::StatusOr<std::string> token = ReadSecretFile(line.token_file);
    if (!token.ok()) return token.status();
    addresses.token = *std::move(token);
  }
  return addresses;
}

int RunCommand(const CLI::App& app, CommandLine& line, const Node& node, const Terminal& terminal) {
  line.top.interval = absl::Seconds(line.top_seconds);
  line.generate.timeout = absl::Seconds(line.generate_seconds);
  line.drain.timeout = absl::Seconds(line.drain_seconds);
  line.doctor.timeout = absl::Seconds(line.doctor_seconds);
  line.purge.timeout = absl::Seconds(line.purge_seconds);
  line.replay.patience = absl::Seconds(line.replay_seconds);
  if (app.got_subcommand("status")) return RunStatus(node, line.status, terminal);
  if (app.got_subcommand("remap")) return RunRemap(node, line.remap, terminal);
  if (app.got_subcommand("top")) return RunTop(node, line.top, terminal);
  if (app.got_subcommand("generate")) return RunGenerate(node, line.generate, terminal);
  if (app.got_subcommand("hint")) return RunHint(node, line.hint, terminal);
  if (app.got_subcommand("tokenize")) return RunTokenize(node, line.tokenize, terminal);
  if (app.got_subcommand("doctor")) return RunDoctor(node, line.doctor, terminal);
  if (app.got_subcommand("limit")) return RunLimit(node, line.limit, terminal);
  if (app.got_subcommand("trim")) return RunTrim(node, line.trim, terminal);
  if (app.got_subcommand("purge")) return RunPurge(node, line.purge, terminal);
  if (app.got_subcommand("events")) return RunEvents(node, line.events, terminal);
  if (app.got_subcommand("drain")) return RunDrain(node, line.drain, terminal);
  if (app.got_subcommand("replay")) return RunServedReplay(node, line.replay, terminal);
  return RunBenchControl(node, line.bench.control, terminal);
}

}  // namespace

int RunPalctl(int argc, const char* const* argv, const Terminal& terminal) {
  CommandLine line;
  CLI::App app(kAbout, "palctl");
  app.require_subcommand(1);
  app.set_help_all_flag("--help-all", "help of all commands");
  app.add_option("--node", line.node_file, "node file")->type_name("FILE");
  app.add_option("--broker", line.broker, "the broker's control socket")->type_name("SOCKET");
  app.add_option("--operator", line.operator_socket, "the broker's socket for operators")
      ->type_name("SOCKET");
  app.add_option("--router", line.router, "the router's address")->type_name("ADDRESS");
  app.add_option("--token-file", line.token_file, "file with the bearer token to use")
      ->type_name("FILE");
  app.add_option("--tls-ca", line.tls_ca,
                 "speak TLS with the router; PEM file of the authority that signed its certificate")
      ->type_name("FILE");
  app.add_option("--server-name", line.server_name,
                 "the name in the router's certificate, if its address has another")
      ->type_name("NAME");
  AddStatus(app, line);
  AddRemap(app, line.remap);
  AddGenerate(app, line);
  AddHint(app, line.hint);
  AddPlan(app, line.plan);
  AddReplay(app, line.replay, line.replay_seconds);
  AddTiers(app, line);
  AddEvents(app, line.events);
  AddOthers(app, line);
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    return app.exit(error, terminal.out, terminal.err) == 0 ? kDone : kUsage;
  }
  if (app.got_subcommand("plan")) return RunPlan(line.plan, terminal);
  if (app.got_subcommand("replay") && !line.replay.serve) return RunReplay(line.replay, terminal);
  if (const std::optional<int> status = RunBenchCommand(app, line.bench, terminal)) return *status;
  absl::StatusOr<NodeAddresses> addresses = FindNode(line);
  if (!addresses.ok()) return Fail(terminal, addresses.status());
  return RunCommand(app, line, Node(*std::move(addresses)), terminal);
}

}  // namespace palimpsest::palctl
