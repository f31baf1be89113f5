// Chat messages to prompt text, by the Jinja template of a model's `tokenizer_config.json`.
#ifndef PALIMPSEST_COMMON_TEXT_CHAT_TEMPLATE_H_
#define PALIMPSEST_COMMON_TEXT_CHAT_TEMPLATE_H_

#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace palimpsest {

struct ChatTurn {
  std::string role;     // "system", "user", "assistant", or what else the template knows
  std::string content;  // UTF-8
};

// Immutable; Render may be called from several threads at once.
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

  // The prompt for the next turn of the assistant. InvalidArgument if there are no messages, a
  // message is not UTF-8, or the template refuses them (its own words are in the message);
  // ResourceExhausted if the prompt gets too long.
  absl::StatusOr<std::string> Render(const std::vector<ChatTurn>& messages,
                                     bool add_generation_prompt = true) const;

 private:
  struct Parts;
  explicit ChatTemplate(std::unique_ptr<Parts> parts);

  std::unique_ptr<const Parts> parts_;
};

}  // namespace palimpsest

#endif  // PALIMPSEST_COMMON_TEXT_CHAT_TEMPLATE_H_
