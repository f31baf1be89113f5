#include "tools/palctl/cache_options.h"

namespace palimpsest::palctl {

void AddRequestHints(CLI::App& generate, GenerateOptions& options) {
  generate.add_option("--conversation", options.conversation,
                      "the conversation that the prompt continues: the same name for each turn");
  CLI::Option* idle =
      generate
          .add_option("--expected-idle", options.expected_idle,
                      "seconds until the conversation goes on, so that its blocks are back by then")
          ->check(CLI::Range(0.0, 31'536'000.0));
  generate.add_flag("--last-turn", options.last_turn, "the conversation will not go on")
      ->excludes(idle);
  generate
      .add_option("--then", options.then,
                  "what becomes of its blocks below the GPU afterwards: they stay in host memory, "
                  "go below it, or are removed")
      ->check(CLI::IsMember({"retain", "demote", "release"}));
  generate
      .add_option("--tool-call", options.tool_call_markers,
                  "text or token by which an answer calls a tool; may be repeated")
      ->allow_extra_args(false);
}

void AddHint(CLI::App& app, HintOptions& options) {
  CLI::App* hint = app.add_subcommand(
      "hint", "says what is to become of the blocks of a conversation that idles");
  hint->add_option(
          "action", options.action.kind,
          "retain: they stay in host memory; demote: they go below it; prefetch: they come "
          "back to it; release: they are removed")
      ->check(CLI::IsMember({"retain", "demote", "prefetch", "release"}))
      ->required();
  hint->add_option("--conversation", options.conversation, "its name")->required();
  hint->add_option("--tenant", options.tenant, "whose it is");
  hint->add_option("--model", options.model, "needed if the tenant has several");
  hint->add_option("--seconds", options.action.seconds,
                   "retain: for how long; prefetch: until when; 0: as long or as soon as may be")
      ->check(CLI::NonNegativeNumber)
      ->capture_default_str();
  hint->add_option("--half-life", options.action.half_life,
                   "retain: seconds after each of which the last half is let go; 0: never")
      ->check(CLI::NonNegativeNumber)
      ->capture_default_str();
  hint->add_option("--bytes", options.action.budget, "retain: at most so many")->type_name("SIZE");
  hint->add_option("--priority", options.action.priority,
                   "retain: takes the place of lower ones, 0 to 100")
      ->check(CLI::Range(0, 100))
      ->capture_default_str();
}

void AddEvents(CLI::App& app, EventsOptions& options) {
  CLI::App* events = app.add_subcommand(
      "events",
      "which KV blocks are in which tier, then what is stored and removed, as it happens");
  events->add_option("--tenant", options.tenant, "whose blocks (default: everybody's)");
  events->add_option("--count", options.count, "end after this many events; 0: never")
      ->capture_default_str();
  events->add_flag("--snapshot", options.snapshot, "only what is there now");
  events->add_flag("--json", options.json,
                   "a line each: {event: snapshot|present|stored|removed, sequence, tenant, tier, "
                   "key}");
}

}  // namespace palimpsest::palctl
