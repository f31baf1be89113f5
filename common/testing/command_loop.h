// The main loop of a process that a test starts to be told what to do, to be killed, and to be
// found gone (broker/server/testing/worker_process.h is the other side): one command a line on
// descriptor 3, one answer a line on descriptor 4, "ok VALUE" or "error CODE MESSAGE".
//
// Threads: commands are obeyed one after the other, by the thread that calls.
#ifndef PALIMPSEST_COMMON_TESTING_COMMAND_LOOP_H_
#define PALIMPSEST_COMMON_TESTING_COMMAND_LOOP_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"

namespace palimpsest {

// The words of a command; those that are missing are empty, or 0.
class Command {
 public:
  explicit Command(std::vector<std::string> words) : words_(std::move(words)) {}

  const std::string& name() const { return words_[0]; }
  std::string word(size_t i) const { return i < words_.size() ? words_[i] : std::string(); }
  uint64_t number(size_t i) const {
    uint64_t value = 0;
    return absl::SimpleAtoi(word(i), &value) ? value : 0;
  }
  const std::vector<std::string>& words() const { return words_; }

 private:
  const std::vector<std::string> words_;  // at least one
};

using CommandAnswer = absl::StatusOr<std::string>;

inline CommandAnswer AnswerOf(const absl::Status& status) {
  if (!status.ok()) return status;
  return "";
}
template <typename T>
CommandAnswer AnswerOf(const absl::StatusOr<T>& value) {
  if (!value.ok()) return value.status();
  return absl::StrCat(*value);
}

// Returns when nobody can give commands any more. No answer may have a line break.
void ObeyCommands(const std::function<CommandAnswer(const Command&)>& obey);

}  // namespace palimpsest

#endif  // PALIMPSEST_COMMON_TESTING_COMMAND_LOOP_H_
