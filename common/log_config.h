// The setting of every process that says how much it logs.
#ifndef PALIMPSEST_COMMON_LOG_CONFIG_H_
#define PALIMPSEST_COMMON_LOG_CONFIG_H_

#include "common/log.h"
#include "common/yaml_config.h"

namespace palimpsest {

// `log_level`: debug, info (the default), warning or error.
inline LogLevel ReadLogLevel(ConfigReader& root) {
  return root.Choice<LogLevel>("log_level",
                               {{"debug", LogLevel::kDebug},
                                {"info", LogLevel::kInfo},
                                {"warning", LogLevel::kWarning},
                                {"error", LogLevel::kError}},
                               LogLevel::kInfo);
}

}  // namespace palimpsest

#endif  // PALIMPSEST_COMMON_LOG_CONFIG_H_
