#include "common/testing/command_loop.h"

#include <unistd.h>

#include <cstdio>

#include "absl/strings/str_replace.h"
#include "absl/strings/str_split.h"

namespace palimpsest {
namespace {

constexpr int kCommands = 3;
constexpr int kAnswers = 4;

}  // namespace

void ObeyCommands(const std::function<CommandAnswer(const Command&)>& obey) {
  FILE* const commands = fdopen(kCommands, "r");
  FILE* const answers = fdopen(kAnswers, "w");
  char line[4096];
  while (commands != nullptr && answers != nullptr && fgets(line, sizeof line, commands)) {
    std::string text(line);
    if (!text.empty() && text.back() == '\n') text.pop_back();
    const CommandAnswer answer = obey(Command(absl::StrSplit(text, ' ')));
    const std::string out =
        answer.ok() ? absl::StrCat("ok ", *answer)
                    : absl::StrCat("error ", absl::StatusCodeToString(answer.status().code()), " ",
                                   answer.status().message());
    fputs((absl::StrReplaceAll(out, {{"\n", " "}}) + "\n").c_str(), answers);
    fflush(answers);
  }
}

}  // namespace palimpsest
