// Logging of the processes: one line per event on stderr, for people and for machines:
//
//   2026-11-29T20:00:00.123Z info broker: slabs revoked tenant=alpha slabs=12 seconds=0.0041
//
//   Log(LogLevel::kInfo, "slabs revoked", {{"tenant", tenant}, {"slabs", count}});
//
// Values with spaces, quotes, '=' or control characters are quoted and escaped, so that a hostile
// string can neither forge a field nor a line. Secrets, tokens, prompts and generated text are
// never logged. Thread-safe.
#ifndef PALIMPSEST_COMMON_LOG_H_
#define PALIMPSEST_COMMON_LOG_H_

#include <concepts>
#include <initializer_list>
#include <string>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"

namespace palimpsest {

enum class LogLevel { kDebug, kInfo, kWarning, kError };

struct LogField {
  LogField(absl::string_view key, const absl::AlphaNum& value)
      : key(key), value(value.data(), value.size()) {}
  template <std::same_as<bool> T>
  LogField(absl::string_view key, T value) : key(key), value(value ? "true" : "false") {}
  // In seconds.
  LogField(absl::string_view key, absl::Duration value)
      : key(key), value(absl::StrCat(absl::ToDoubleSeconds(value))) {}
  LogField(absl::string_view key, const absl::Status& value) : key(key), value(value.ToString()) {}
  // Ids and Bytes.
  template <typename T>
  requires requires(const T& t) { std::string(t.ToString()); }
  LogField(absl::string_view key, const T& value) : key(key), value(value.ToString()) {}

  absl::string_view key;
  std::string value;
};

// Sets the process's name and the least level that is written; call it before other threads start.
// Before, everything from info on is written under the name "palimpsest".
void InitLog(absl::string_view process, LogLevel level);

void Log(LogLevel level, absl::string_view event, std::initializer_list<LogField> fields = {});

// The line that Log writes, without time, level and process.
std::string FormatLogLine(absl::string_view event, std::initializer_list<LogField> fields);

}  // namespace palimpsest

#endif  // PALIMPSEST_COMMON_LOG_H_
