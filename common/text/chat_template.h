// Chat messages to prompt text, by the Jinja template of a model's `tokenizer_config.json`. The
// engine is llama.cpp's; unlike Jinja2 it counts bytes where a template asks for the length of a
// text.
#ifndef PALIMPSEST_COMMON_TEXT_CHAT_TEMPLATE_H_
#define PALIMPSEST_COMMON_TEXT_CHAT_TEMPLATE_H_

#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "common/text/tokenizer.h"

namespace palimpsest {

struct ChatTurn {
  std::string role;     // "system", "user", "assistant", or what else the template knows
  std::string content;  // UTF-8
};

struct ChatPrompt {
  std::string text;
  // Where `text` came from the messages, in order. Given to Tokenizer::Encode as
  // EncodeOptions::literal, so that a message cannot pose as the end of its own turn.
  std::vector<TextRange> literal;
};

// Immutable; Render may be called from several threads at once. A template is trusted like the
// model that it comes with; messages are not.
class ChatTemplate {
 public:
  // Takes `chat_template` (a string, or a list of named ones, of which "default" is taken),
  // `bos_token`, `eos_token` and the like from the text of a tokenizer_config.json. NotFound if it
  // has no template; InvalidArgument with the place in the template if that does not parse.
  static absl::StatusOr<std::unique_ptr<ChatTemplate>> Parse(absl::string_view tokenizer_config);

  // Reads tokenizer_config.json of a model folder; a template may also stand beside it in
  // chat_template.jinja.
  static absl::StatusOr<std::unique_ptr<ChatTemplate>> Load(const std::string& folder);

  ~ChatTemplate();
  ChatTemplate(const ChatTemplate&) = delete;
  ChatTemplate& operator=(const ChatTemplate&) = delete;

  // The prompt for the next turn of the assistant; without `add_generation_prompt` just the
  // messages. `now` is the date that a template may write (strftime_now, in UTC). InvalidArgument
  // if there are no messages or too many, a message is not UTF-8, or the template refuses them (its
  // own words are in the message); ResourceExhausted if the prompt gets too long.
  absl::StatusOr<ChatPrompt> Render(const std::vector<ChatTurn>& messages,
                                    bool add_generation_prompt = true,
                                    absl::Time now = absl::Now()) const;

 private:
  struct Parts;
  // `source` is the template; empty: the one in the config.
  static absl::StatusOr<std::unique_ptr<ChatTemplate>> Create(absl::string_view tokenizer_config,
                                                              std::string source);
  explicit ChatTemplate(std::unique_ptr<Parts> parts);

  std::unique_ptr<const Parts> parts_;
};

}  // namespace palimpsest

#endif  // PALIMPSEST_COMMON_TEXT_CHAT_TEMPLATE_H_
