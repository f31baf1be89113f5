#include <grpcpp/client_context.h>

#include <algorithm>
#include <atomic>
#include <nlohmann/json.hpp>
#include <thread>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "common/file.h"
#include "common/grpc_time.h"
#include "common/json_text.h"
#include "common/monotonic_time.h"
#include "common/mutex.h"
#include "common/text/utf8.h"
#include "tools/palctl/commands.h"

namespace palimpsest::palctl {
namespace {

using nlohmann::json;

constexpr Bytes kMaxPromptsFile = MiB(256);
constexpr Bytes kMaxEarlierFile = MiB(4);

std::string FinishReasonName(v1::FinishReason reason) {
  return absl::AsciiStrToLower(absl::StripPrefix(v1::FinishReason_Name(reason), "FINISH_REASON_"));
}

// One request and what came back.
struct Answer {
  std::string text;
  std::vector<int32_t> token_ids;
  json logprobs = json::array();
  v1::FinishReason finish_reason = v1::FINISH_REASON_UNSPECIFIED;
  v1::Usage usage;
  std::string request_id;
  absl::Duration first_token;
  absl::Duration total;
};

json LogprobJson(const v1::TokenLogprob& logprob) {
  json top = json::array();
  for (const v1::TopLogprob& t : logprob.top()) {
    top.push_back({{"token_id", t.token_id()}, {"logprob", t.logprob()}});
  }
  return {{"token_id", logprob.token_id()}, {"logprob", logprob.logprob()}, {"top", top}};
}

json AnswerJson(const std::string& tenant, const std::string& prompt, const Answer& answer,
                bool logprobs) {
  json record = {{"tenant", tenant},
                 {"prompt", prompt},
                 {"text", answer.text},
                 {"token_ids", answer.token_ids},
                 {"finish_reason", FinishReasonName(answer.finish_reason)},
                 {"usage",
                  {{"prompt_tokens", answer.usage.prompt_tokens()},
                   {"cached_tokens", answer.usage.cached_tokens()},
                   {"output_tokens", answer.usage.output_tokens()},
                   {"preemptions", answer.usage.preemptions()}}},
                 {"request_id", answer.request_id},
                 {"ttft_seconds", absl::ToDoubleSeconds(answer.first_token)},
                 {"seconds", absl::ToDoubleSeconds(answer.total)}};
  if (logprobs) record["logprobs"] = answer.logprobs;
  return record;
}

// Requires a `then` that is an action, or empty.
void FillHints(const GenerateOptions& options, v1::GenerateRequest& request) {
  request.set_conversation_id(options.conversation);
  v1::RequestHints& hints = *request.mutable_hints();
  if (options.expected_idle) hints.set_expected_idle_seconds(*options.expected_idle);
  hints.set_last_turn(options.last_turn);
  if (!options.then.empty()) *hints.mutable_then() = *ToCacheAction({.kind = options.then});
  for (const std::string& marker : options.tool_call_markers) hints.add_tool_call_markers(marker);
}

v1::GenerateRequest MakeRequest(const GenerateOptions& options, const v1::Chat& earlier,
                                const std::string& prompt) {
  v1::GenerateRequest request;
  request.set_model(options.model);
  if (options.chat) {
    *request.mutable_chat() = earlier;
    v1::ChatMessage* message = request.mutable_chat()->add_messages();
    message->set_role("user");
    message->set_content(prompt);
  } else {
    request.set_text(prompt);
  }
  v1::SamplingParams* sampling = request.mutable_sampling();
  if (options.max_tokens) sampling->set_max_tokens(*options.max_tokens);
  if (options.temperature) sampling->set_temperature(*options.temperature);
  if (options.top_k) sampling->set_top_k(*options.top_k);
  if (options.top_p) sampling->set_top_p(*options.top_p);
  if (options.min_p) sampling->set_min_p(*options.min_p);
  if (options.repetition_penalty) sampling->set_repetition_penalty(*options.repetition_penalty);
  if (options.seed) sampling->set_seed(*options.seed);
  if (options.logprobs) sampling->set_logprobs(*options.logprobs);
  sampling->set_ignore_eos(options.ignore_eos);
  for (const std::string& stop : options.stop) sampling->add_stop(stop);
  FillHints(options, request);
  return request;
}

// Runs requests, several at a time, and prints their answers as they come.
class Generator {
 public:
  // `options` with what its files hold.
  Generator(const Node& node, const GenerateOptions& options, v1::Chat earlier,
            const Terminal& terminal)
      : node_(node),
        options_(options),
        earlier_(std::move(earlier)),
        tenant_(options.tenant),
        terminal_(terminal),
        only_one_(options.prompts.size() == 1) {}

  absl::Status Run() {
    const size_t threads =
        std::min<size_t>(options_.prompts.size(), static_cast<size_t>(options_.concurrency));
    std::vector<std::thread> workers;
    for (size_t i = 0; i < threads; ++i) workers.emplace_back([this] { Work(); });
    for (std::thread& worker : workers) worker.join();
    MutexLock lock(&mutex_);
    return failure_;
  }

 private:
  void Work() {
    while (!failed_) {
      const size_t index = next_.fetch_add(1);
      if (index >= options_.prompts.size()) return;
      const std::string& prompt = options_.prompts[index];
      const absl::StatusOr<Answer> answer = Ask(prompt);
      MutexLock lock(&mutex_);
      if (answer.ok()) {
        Print(prompt, *answer);
      } else if (!failed_.exchange(true)) {
        failure_ = answer.status();
      }
    }
  }

  absl::StatusOr<Answer> Ask(const std::string& prompt) {
    const absl::StatusOr<v1::Router::Stub*> router = node_.router();
    if (!router.ok()) return router.status();
    grpc::ClientContext context;
    const absl::Status authorized = node_.Authorize(tenant_, context);
    if (!authorized.ok()) return authorized;
    const absl::Time start = MonotonicNow();
    context.set_deadline(GrpcDeadline(start + options_.timeout));
    Answer answer;
    const auto stream = (*router)->Generate(&context, MakeRequest(options_, earlier_, prompt));
    v1::GenerateResponse response;
    while (stream->Read(&response)) {
      if (answer.token_ids.empty()) answer.first_token = MonotonicNow() - start;
      answer.text += response.text();
      answer.token_ids.insert(answer.token_ids.end(), response.token_ids().begin(),
                              response.token_ids().end());
      for (const v1::TokenLogprob& logprob : response.logprobs()) {
        answer.logprobs.push_back(LogprobJson(logprob));
      }
      if (!response.request_id().empty()) answer.request_id = response.request_id();
      if (response.has_usage()) answer.usage = response.usage();
      answer.finish_reason = response.finish_reason();
      Stream(response.text());
    }
    const absl::Status finished = node_.RouterError(stream->Finish());
    if (!finished.ok()) return finished;
    answer.total = MonotonicNow() - start;
    return answer;
  }

  // Pieces of several answers would mix, so only a single one is shown as it comes.
  void Stream(const std::string& text) {
    if (!only_one_ || text.empty()) return;
    if (options_.json && !options_.stream) return;
    MutexLock lock(&mutex_);
    if (options_.json) {
      terminal_.out << json({{"delta", text}}).dump() << std::endl;
    } else {
      terminal_.out << text << std::flush;
    }
  }

  void Print(const std::string& prompt, const Answer& answer)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    if (options_.json) {
      terminal_.out << AnswerJson(tenant_, prompt, answer, options_.logprobs.has_value()).dump()
                    << std::endl;
      return;
    }
    if (!only_one_) terminal_.out << "> " << prompt << "\n" << answer.text;
    terminal_.out << "\n" << (only_one_ ? "" : "\n");
    if (options_.logprobs) {
      for (const json& logprob : answer.logprobs) terminal_.out << logprob.dump() << "\n";
    }
    terminal_.out << std::flush;
    const double seconds = absl::ToDoubleSeconds(answer.total);
    terminal_.err << answer.usage.prompt_tokens() << " prompt tokens ("
                  << answer.usage.cached_tokens() << " cached), " << answer.usage.output_tokens()
                  << " output tokens in " << seconds << " s, the first after "
                  << absl::ToDoubleSeconds(answer.first_token) << " s; ended by "
                  << FinishReasonName(answer.finish_reason) << "\n";
  }

  const Node& node_;
  const GenerateOptions& options_;
  const v1::Chat earlier_;
  const std::string tenant_;
  const Terminal& terminal_;
  const bool only_one_;
  std::atomic<size_t> next_{0};
  std::atomic<bool> failed_{false};
  Mutex mutex_;
  absl::Status failure_ ABSL_GUARDED_BY(mutex_);
};

// The prompts of flags and file, checked here because gRPC refuses broken UTF-8 without a word.
absl::StatusOr<std::vector<std::string>> Prompts(const GenerateOptions& options) {
  std::vector<std::string> prompts = options.prompts;
  if (!options.prompts_file.empty()) {
    absl::StatusOr<std::string> text = ReadFile(options.prompts_file, kMaxPromptsFile);
    if (!text.ok()) return text.status();
    for (absl::string_view line : absl::StrSplit(*text, '\n', absl::SkipWhitespace())) {
      prompts.emplace_back(absl::StripSuffix(line, "\r"));
    }
  }
  if (prompts.empty()) {
    return absl::InvalidArgumentError("there is no prompt: give one, or --prompts-file FILE");
  }
  for (const std::string& prompt : prompts) {
    const absl::Status utf8 = CheckUtf8(prompt, "the prompt");
    if (!utf8.ok()) return utf8;
  }
  return prompts;
}

// The messages of GenerateOptions::earlier_file; none without a file.
absl::StatusOr<v1::Chat> EarlierMessages(const std::string& file) {
  v1::Chat chat;
  if (file.empty()) return chat;
  const absl::StatusOr<std::string> text = ReadFile(file, kMaxEarlierFile);
  if (!text.ok()) return text.status();
  const absl::StatusOr<json> messages =
      ParseJson(*text, {.max_bytes = static_cast<size_t>(kMaxEarlierFile.count())});
  if (!messages.ok()) {
    return absl::InvalidArgumentError(absl::StrCat(file, ": ", messages.status().message()));
  }
  const auto is_text = [](const json& message, const char* key) {
    return message.is_object() && message.contains(key) && message[key].is_string();
  };
  const auto is_message = [&](const json& message) {
    return is_text(message, "role") && is_text(message, "content");
  };
  if (!messages->is_array() || !std::all_of(messages->begin(), messages->end(), is_message)) {
    return absl::InvalidArgumentError(absl::StrCat(
        file, R"(: expected the earlier messages as [{"role": "user", "content": TEXT}, ...])"));
  }
  for (const json& message : *messages) {
    v1::ChatMessage* added = chat.add_messages();
    added->set_role(message["role"].get<std::string>());
    added->set_content(message["content"].get<std::string>());
  }
  return chat;
}

}  // namespace

int RunGenerate(const Node& node, const GenerateOptions& given, const Terminal& terminal) {
  GenerateOptions options = given;
  absl::StatusOr<std::vector<std::string>> prompts = Prompts(given);
  if (!prompts.ok()) return Fail(terminal, prompts.status());
  options.prompts = *std::move(prompts);
  if (options.tenant.empty()) {
    absl::StatusOr<std::string> tenant = node.OnlyTenant();
    if (!tenant.ok()) return Fail(terminal, tenant.status());
    options.tenant = *std::move(tenant);
  }
  absl::StatusOr<v1::Chat> earlier = EarlierMessages(options.earlier_file);
  if (!earlier.ok()) return Fail(terminal, earlier.status());
  const absl::Status status = Generator(node, options, *std::move(earlier), terminal).Run();
  return status.ok() ? kDone : Fail(terminal, status);
}

}  // namespace palimpsest::palctl
