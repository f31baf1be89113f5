// A SocketBlockWorker that obeys commands on descriptor 3 and answers on descriptor 4, as
// broker/server/testing/worker_process.h expects: to be killed.
#include <unistd.h>

#include <cstdio>
#include <string>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "broker/blocks/testing/socket_block_worker.h"

namespace palimpsest {
namespace {

constexpr uint64_t kBlockBytes = 64 << 10;

template <typename T>
absl::StatusOr<std::string> Text(const absl::StatusOr<T>& value) {
  if (!value.ok()) return value.status();
  return absl::StrCat(*value);
}

absl::StatusOr<std::string> Text(const absl::Status& status) {
  if (!status.ok()) return status;
  return "";
}

absl::StatusOr<std::string> Obey(SocketBlockWorker& worker, const std::vector<std::string>& words) {
  const auto number = [&words](size_t i) {
    uint64_t value = 0;
    return i < words.size() && absl::SimpleAtoi(words[i], &value) ? value : 0;
  };
  const std::string& command = words[0];
  const auto count = static_cast<uint32_t>(number(2));
  if (command == "hello") return Text(worker.Hello(words[1], words[2], words[3]));
  if (command == "attach") return Text(worker.Attach(words[1]));
  if (command == "put") return Text(worker.Put(number(1), count));
  if (command == "reserve") return Text(worker.Reserve(number(1), count));
  if (command == "get") {
    return Text(worker.Get(number(1), count, number(3), absl::Seconds(number(4))));
  }
  if (command == "acquire") {
    const auto acquired = worker.Acquire(number(1), count, number(3), absl::Seconds(number(4)));
    if (!acquired.ok()) return acquired.status();
    return absl::StrCat(acquired->blocks_size());
  }
  if (command == "silent") return worker.set_answers(false), "";
  return absl::UnimplementedError(command);
}

}  // namespace
}  // namespace palimpsest

int main() {
  palimpsest::SocketBlockWorker worker(palimpsest::kBlockBytes);
  FILE* const commands = fdopen(3, "r");
  FILE* const answers = fdopen(4, "w");
  char line[4096];
  while (commands != nullptr && answers != nullptr && fgets(line, sizeof line, commands)) {
    std::string text(line);
    if (!text.empty() && text.back() == '\n') text.pop_back();
    const auto answer = palimpsest::Obey(worker, absl::StrSplit(text, ' '));
    const std::string out =
        answer.ok() ? absl::StrCat("ok ", *answer, "\n")
                    : absl::StrCat("error ", absl::StatusCodeToString(answer.status().code()), " ",
                                   answer.status().message(), "\n");
    fputs(out.c_str(), answers);
    fflush(answers);
  }
  // Without destructors: a test that is done with its worker wants it gone.
  _exit(0);
}
