#include "common/log.h"

#include <spdlog/sinks/stdout_sinks.h>
#include <spdlog/spdlog.h>

#include <algorithm>
#include <memory>

#include "absl/strings/escaping.h"

namespace palimpsest {
namespace {

std::shared_ptr<spdlog::logger> NewLogger(absl::string_view process) {
  auto logger = std::make_shared<spdlog::logger>(std::string(process),
                                                 std::make_shared<spdlog::sinks::stderr_sink_mt>());
  logger->set_pattern("%Y-%m-%dT%H:%M:%S.%eZ %l %n: %v", spdlog::pattern_time_type::utc);
  logger->flush_on(spdlog::level::info);
  return logger;
}

// Never destroyed: threads may log until the process ends.
std::shared_ptr<spdlog::logger>& Logger() {
  static auto* const logger = new std::shared_ptr<spdlog::logger>(NewLogger("palimpsest"));
  return *logger;
}

spdlog::level::level_enum SpdlogLevel(LogLevel level) {
  switch (level) {
    case LogLevel::kDebug:
      return spdlog::level::debug;
    case LogLevel::kInfo:
      return spdlog::level::info;
    case LogLevel::kWarning:
      return spdlog::level::warn;
    case LogLevel::kError:
      return spdlog::level::err;
  }
  return spdlog::level::err;
}

bool Plain(absl::string_view value) {
  return !value.empty() && std::all_of(value.begin(), value.end(), [](unsigned char c) {
    return c > ' ' && c != '"' && c != '=' && c != '\\' && c != 0x7f;
  });
}

bool HasControlCharacters(absl::string_view text) {
  return std::any_of(text.begin(), text.end(),
                     [](unsigned char c) { return c < ' ' || c == 0x7f; });
}

}  // namespace

void InitLog(absl::string_view process, LogLevel level) {
  Logger() = NewLogger(process);
  Logger()->set_level(SpdlogLevel(level));
}

std::string FormatLogLine(absl::string_view event, std::initializer_list<LogField> fields) {
  std::string line =
      HasControlCharacters(event) ? absl::Utf8SafeCEscape(event) : std::string(event);
  for (const LogField& field : fields) {
    absl::StrAppend(&line, " ", field.key, "=");
    if (Plain(field.value)) {
      line += field.value;
    } else {
      absl::StrAppend(&line, "\"", absl::Utf8SafeCEscape(field.value), "\"");
    }
  }
  return line;
}

void Log(LogLevel level, absl::string_view event, std::initializer_list<LogField> fields) {
  spdlog::logger& logger = *Logger();
  const spdlog::level::level_enum at = SpdlogLevel(level);
  if (logger.should_log(at)) logger.log(at, spdlog::string_view_t(FormatLogLine(event, fields)));
}

}  // namespace palimpsest
