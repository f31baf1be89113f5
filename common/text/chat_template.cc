#include "common/text/chat_template.h"

#include <exception>
#include <filesystem>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/jinja/lexer.h"
#include "common/jinja/parser.h"
#include "common/jinja/runtime.h"
#include "common/text/json_fields.h"
#include "common/text/utf8.h"
#include "nlohmann/json.hpp"

namespace palimpsest {

using nlohmann::json;

namespace {

constexpr int64_t kMaxConfigBytes = 8 << 20;
constexpr size_t kMaxTemplateBytes = 256 << 10;
constexpr int kMaxNesting = 100;
constexpr size_t kMaxMessages = 4096;
constexpr size_t kMaxMessageBytes = 8 << 20;
constexpr size_t kMaxPromptBytes = 16 << 20;
constexpr int64_t kMaxRange = 10'000;

// What raise_exception throws. Not a std::exception, because the engine wraps those.
struct Refusal {
  std::string reason;
};

jinja::value RaiseException(const jinja::func_args& args) {
  args.ensure_count(1, 1);
  throw Refusal{args.get_pos(0)->as_string().str()};
}

// The engine's own range() has no limit.
jinja::value Range(const jinja::func_args& args) {
  args.ensure_count(1, 3);
  const auto number = [&](size_t i) { return args.get_pos(i)->as_int(); };
  const int64_t start = args.count() > 1 ? number(0) : 0;
  const int64_t stop = args.count() > 1 ? number(1) : number(0);
  const int64_t step = args.count() > 2 ? number(2) : 1;
  if (step == 0) throw Refusal{"range() with a step of 0"};
  auto list = jinja::mk_val<jinja::value_array>();
  for (__int128 i = start; step > 0 ? i < stop : i > stop; i += step) {
    if (list->val_arr.size() == kMaxRange) {
      throw Refusal{absl::StrCat("range() of more than ", kMaxRange, " numbers")};
    }
    list->push_back(jinja::mk_val<jinja::value_int>(static_cast<int64_t>(i)));
  }
  return list;
}

jinja::value Function(const std::string& name, const jinja::func_handler& handler) {
  return jinja::mk_val<jinja::value_func>(name, handler);
}

// Brackets of expressions and blocks open at once: what the engine's parser recurses on.
absl::Status CheckNesting(const std::vector<jinja::token>& tokens) {
  int brackets = 0, blocks = 0;
  for (size_t i = 0; i < tokens.size(); ++i) {
    switch (tokens[i].t) {
      case jinja::token::open_paren:
      case jinja::token::open_square_bracket:
      case jinja::token::open_curly_bracket:
        ++brackets;
        break;
      case jinja::token::close_paren:
      case jinja::token::close_square_bracket:
      case jinja::token::close_curly_bracket:
        --brackets;
        break;
      case jinja::token::open_statement:
        if (i + 1 < tokens.size()) {
          const std::string& word = tokens[i + 1].value;
          if (word == "if" || word == "for" || word == "macro") ++blocks;
          if (word == "endif" || word == "endfor" || word == "endmacro") --blocks;
        }
        break;
      default:
        break;
    }
    if (brackets + blocks > kMaxNesting) {
      return absl::InvalidArgumentError(
          absl::StrCat("the chat template nests deeper than ", kMaxNesting));
    }
  }
  return absl::OkStatus();
}

// The text of `chat_template`: a string, or the one named "default" of a list.
absl::StatusOr<std::string> TemplateText(const json& config) {
  const json* member = FindMember(config, "chat_template");
  if (member == nullptr) return absl::NotFoundError("tokenizer_config.json has no chat_template");
  if (member->is_string()) return member->get<std::string>();
  if (member->is_array()) {
    for (const json& entry : *member) {
      const json* name = FindMember(entry, "name");
      if (name != nullptr && *name == "default") {
        return RequireString(entry, "template", "the chat template \"default\"");
      }
    }
  }
  return absl::InvalidArgumentError(
      "chat_template must be a string or a list with a template named \"default\"");
}

absl::Status CheckMessages(const std::vector<ChatTurn>& messages) {
  if (messages.empty()) return absl::InvalidArgumentError("a chat needs at least one message");
  if (messages.size() > kMaxMessages) {
    return absl::InvalidArgumentError(absl::StrCat("a chat has at most ", kMaxMessages,
                                                   " messages, this one has ", messages.size()));
  }
  size_t bytes = 0;
  for (size_t i = 0; i < messages.size(); ++i) {
    const std::string where = absl::StrCat("of message ", i);
    absl::Status status = CheckUtf8(messages[i].role, absl::StrCat("role ", where));
    status.Update(CheckUtf8(messages[i].content, absl::StrCat("content ", where)));
    if (!status.ok()) return status;
    bytes += messages[i].role.size() + messages[i].content.size();
  }
  if (bytes > kMaxMessageBytes) {
    return absl::InvalidArgumentError(absl::StrCat("the messages of a chat have at most ",
                                                   kMaxMessageBytes, " bytes, these have ", bytes));
  }
  return absl::OkStatus();
}

// Strings of a stranger are marked, and the engine keeps the mark through concatenation and
// filters.
jinja::value Marked(const std::string& text) {
  return jinja::mk_val<jinja::value_string>(jinja::string(text, /*user_input=*/true));
}

jinja::value MessageList(const std::vector<ChatTurn>& messages) {
  auto list = jinja::mk_val<jinja::value_array>();
  for (const ChatTurn& turn : messages) {
    auto message = jinja::mk_val<jinja::value_object>();
    message->insert("role", Marked(turn.role));
    message->insert("content", Marked(turn.content));
    list->push_back(std::move(message));
  }
  return list;
}

}  // namespace

struct ChatTemplate::Parts {
  std::string source;
  jinja::program program;
  std::vector<std::pair<std::string, std::string>> named_tokens;  // "bos_token", "<s>"

  void Fill(jinja::context& context, absl::Time now) const;
};

ChatTemplate::ChatTemplate(std::unique_ptr<Parts> parts) : parts_(std::move(parts)) {}
ChatTemplate::~ChatTemplate() = default;

absl::StatusOr<std::unique_ptr<ChatTemplate>> ChatTemplate::Create(absl::string_view config_text,
                                                                   std::string source) {
  const auto config = ParseJson(config_text, "tokenizer_config.json");
  if (!config.ok()) return config.status();
  if (source.empty()) {
    auto text = TemplateText(*config);
    if (!text.ok()) return text.status();
    source = *std::move(text);
  }
  if (source.size() > kMaxTemplateBytes) {
    return absl::InvalidArgumentError(absl::StrCat("the chat template has ", source.size(),
                                                   " bytes, at most ", kMaxTemplateBytes,
                                                   " are allowed"));
  }
  auto parts = std::make_unique<Parts>();
  try {
    const jinja::lexer_result tokens = jinja::lexer().tokenize(source);
    if (const absl::Status status = CheckNesting(tokens.tokens); !status.ok()) return status;
    parts->program = jinja::parse_from_tokens(tokens);
    parts->source = tokens.source;
  } catch (const std::exception& error) {
    return absl::InvalidArgumentError(absl::StrCat("the chat template is wrong: ", error.what()));
  }
  for (const char* name : {"bos_token", "eos_token", "pad_token", "unk_token"}) {
    const json* token = FindMember(*config, name);
    if (token != nullptr && token->is_object()) token = FindMember(*token, "content");
    if (token != nullptr && token->is_string()) {
      parts->named_tokens.emplace_back(name, token->get<std::string>());
    }
  }
  return std::unique_ptr<ChatTemplate>(new ChatTemplate(std::move(parts)));
}

absl::StatusOr<std::unique_ptr<ChatTemplate>> ChatTemplate::Parse(
    absl::string_view tokenizer_config) {
  return Create(tokenizer_config, "");
}

absl::StatusOr<std::unique_ptr<ChatTemplate>> ChatTemplate::Load(const std::string& folder) {
  const std::string path = folder + "/tokenizer_config.json";
  const auto config = ReadTextFile(path, kMaxConfigBytes);
  if (!config.ok()) return config.status();
  std::string source;
  std::error_code no_such_file;
  const std::string separate = folder + "/chat_template.jinja";
  if (std::filesystem::exists(separate, no_such_file)) {
    auto text = ReadTextFile(separate, kMaxTemplateBytes);
    if (!text.ok()) return text.status();
    source = *std::move(text);
  }
  auto result = Create(*config, std::move(source));
  if (result.ok()) return result;
  return absl::Status(result.status().code(),
                      absl::StrCat(folder, ": ", result.status().message()));
}

void ChatTemplate::Parts::Fill(jinja::context& context, absl::Time now) const {
  for (const auto& [name, text] : named_tokens) {
    context.set_val(name, jinja::mk_val<jinja::value_string>(text));
  }
  // Hugging Face passes these two as None where there are none.
  context.set_val("tools", jinja::mk_val<jinja::value_none>());
  context.set_val("documents", jinja::mk_val<jinja::value_none>());
  context.set_val("raise_exception", Function("raise_exception", RaiseException));
  context.set_val("range", Function("range", Range));
  context.set_val("strftime_now", Function("strftime_now", [now](const jinja::func_args& args) {
                    args.ensure_count(1, 1);
                    return jinja::mk_val<jinja::value_string>(absl::FormatTime(
                        args.get_pos(0)->as_string().str(), now, absl::UTCTimeZone()));
                  }));
}

absl::StatusOr<ChatPrompt> ChatTemplate::Render(const std::vector<ChatTurn>& messages,
                                                bool add_generation_prompt, absl::Time now) const {
  if (const absl::Status status = CheckMessages(messages); !status.ok()) return status;
  ChatPrompt prompt;
  try {
    jinja::context context(parts_->source);
    parts_->Fill(context, now);
    context.set_val("messages", MessageList(messages));
    context.set_val("add_generation_prompt",
                    jinja::mk_val<jinja::value_bool>(add_generation_prompt));
    const jinja::value output = jinja::runtime(context).execute(parts_->program);
    for (const auto& part : jinja::runtime::gather_string_parts(output)->as_string().parts) {
      const size_t begin = prompt.text.size();
      prompt.text += part.val;
      if (prompt.text.size() > kMaxPromptBytes) {
        return absl::ResourceExhaustedError(
            absl::StrCat("the chat makes a prompt of more than ", kMaxPromptBytes, " bytes"));
      }
      if (part.is_input && !part.val.empty()) {
        prompt.literal.push_back({begin, prompt.text.size()});
      }
    }
  } catch (const Refusal& refusal) {
    return absl::InvalidArgumentError(
        absl::StrCat("the chat template refuses the messages: ", refusal.reason));
  } catch (const std::exception& error) {
    return absl::InvalidArgumentError(
        absl::StrCat("the chat template fails on these messages: ", error.what()));
  }
  return prompt;
}

}  // namespace palimpsest
