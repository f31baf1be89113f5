// A SocketBlockWorker in a process of its own (common/testing/command_loop.h).
#include <unistd.h>

#include <string>

#include "absl/strings/str_cat.h"
#include "broker/blocks/testing/socket_block_worker.h"
#include "common/testing/command_loop.h"

namespace palimpsest {
namespace {

constexpr uint64_t kBlockBytes = 64 << 10;

v1::CacheAction HintOf(const std::string& word) {
  v1::CacheAction action;
  if (word == "prefetch") {
    action.mutable_prefetch();
  } else if (word == "demote") {
    action.mutable_demote();
  } else if (word == "release") {
    action.mutable_release();
  } else {
    action.mutable_retain();
  }
  return action;
}

// Sequences and requests are numbers; waits are in milliseconds.
CommandAnswer Obey(SocketBlockWorker& worker, const Command& command) {
  const std::string& name = command.name();
  const uint64_t first = command.number(1);
  const auto count = static_cast<uint32_t>(command.number(2));
  if (name == "hello") {
    return AnswerOf(worker.Hello(command.word(1), command.word(2), command.word(3)));
  }
  if (name == "attach") return AnswerOf(worker.Attach(command.word(1)));
  if (name == "put") return AnswerOf(worker.Put(first, count));
  if (name == "reserve") return AnswerOf(worker.Reserve(first, count, command.number(3)));
  if (name == "commit") return AnswerOf(worker.Commit());
  if (name == "abort") return AnswerOf(worker.Abort());
  const absl::Duration wait = absl::Milliseconds(command.number(4));
  if (name == "get") return AnswerOf(worker.Get(first, count, command.number(3), wait));
  if (name == "acquire") {
    const auto acquired = worker.Acquire(first, count, command.number(3), wait);
    if (!acquired.ok()) return acquired.status();
    return absl::StrCat(acquired->blocks_size());
  }
  if (name == "verify") return AnswerOf(worker.Verify(first));
  if (name == "damage") return worker.Damage(first) ? "1" : "0";
  if (name == "release") return AnswerOf(worker.Release(first));
  if (name == "end") return AnswerOf(worker.EndRequest(first));
  if (name == "hint") {
    return AnswerOf(worker.Hint(HintOf(command.word(4)), first, count,
                                static_cast<uint32_t>(command.number(3))));
  }
  if (name == "silent") return worker.set_answers(false), "";
  return absl::UnimplementedError(name);
}

}  // namespace
}  // namespace palimpsest

int main() {
  palimpsest::SocketBlockWorker worker(palimpsest::kBlockBytes);
  palimpsest::ObeyCommands(
      [&worker](const palimpsest::Command& command) { return palimpsest::Obey(worker, command); });
  // Without destructors: a test that is done with its worker wants it gone.
  _exit(0);
}
