// Reads a process's YAML configuration, so that each setting is stated once: name, type, bounds and
// default stand in the line of code that reads it.
//
//   absl::StatusOr<YamlConfig> yaml = YamlConfig::ReadFile("broker.yaml");
//   ConfigReader root = yaml->root();
//   config.socket = root.String("socket", "/run/palimpsest/broker.sock");  // with a default
//   config.pool = root.Size("pool_bytes", MiB(2), GiB(1024));               // required
//   for (auto& [name, tenant] : root.NamedMaps("tenants", 64)) {
//     config.priority[name] = tenant.Int("priority", 0, 9, 5);
//   }
//   if (absl::Status status = yaml->Finish(); !status.ok()) return status;
//
// Errors are collected, with file and line, and reported together by Finish: wrong types, values
// out of bounds, missing settings, and keys that nobody read (typing errors). A getter that found
// an error returns its default, or a value inside the bounds. EffectiveYaml shows all that was
// read, defaults included: what --print-config prints, and itself a valid configuration.
//
// The syntax is YAML without anchors, aliases, tags and second documents; input, depth and number
// of values are bounded, so that a hostile file costs nothing. Sizes are ParseBytes's ("64 MiB"),
// durations absl's ("250ms", "1h30m"), booleans true and false. Not thread-safe.
#ifndef PALIMPSEST_COMMON_YAML_CONFIG_H_
#define PALIMPSEST_COMMON_YAML_CONFIG_H_

#include <cstdint>
#include <initializer_list>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "common/bytes.h"

namespace palimpsest {

namespace yaml_config_internal {
struct Document;
struct Node;
struct Effective;
}  // namespace yaml_config_internal

// One map of the configuration. A small handle, valid as long as its YamlConfig. `fallback` is used
// when the key is missing; without one the key is required.
class ConfigReader {
 public:
  bool Has(absl::string_view key) const;

  std::string String(absl::string_view key,
                     const std::optional<std::string>& fallback = std::nullopt);
  bool Bool(absl::string_view key, std::optional<bool> fallback = std::nullopt);
  int64_t Int(absl::string_view key, int64_t min, int64_t max,
              std::optional<int64_t> fallback = std::nullopt);
  double Double(absl::string_view key, double min, double max,
                std::optional<double> fallback = std::nullopt);
  Bytes Size(absl::string_view key, Bytes min, Bytes max,
             std::optional<Bytes> fallback = std::nullopt);
  absl::Duration Duration(absl::string_view key, absl::Duration min, absl::Duration max,
                          std::optional<absl::Duration> fallback = std::nullopt);

  // One of the named values.
  template <typename Enum>
  Enum Choice(absl::string_view key,
              std::initializer_list<std::pair<absl::string_view, Enum>> choices,
              std::optional<Enum> fallback = std::nullopt) {
    std::vector<absl::string_view> names;
    std::optional<size_t> fallback_index;
    for (const auto& [name, value] : choices) {
      if (fallback == value) fallback_index = names.size();
      names.push_back(name);
    }
    return (choices.begin() + ChoiceIndex(key, names, fallback_index))->second;
  }

  // A list of strings; empty when missing.
  std::vector<std::string> Strings(absl::string_view key, size_t max_items);

  // A map in this one. When missing it is read as an empty map: its settings take their defaults,
  // and its required ones are missing.
  ConfigReader Map(absl::string_view key);

  // A map of name to string; empty when missing.
  std::vector<std::pair<std::string, std::string>> NamedStrings(absl::string_view key,
                                                                size_t max_items);

  // A list of maps, and a map of name to map; empty when missing.
  std::vector<ConfigReader> Maps(absl::string_view key, size_t max_items);
  std::vector<std::pair<std::string, ConfigReader>> NamedMaps(absl::string_view key,
                                                              size_t max_items);

  // Reports that the value of `key` (or this map, if it is missing) is wrong for a reason that only
  // the caller knows.
  void Error(absl::string_view key, absl::string_view message);

 private:
  friend class YamlConfig;
  using Document = yaml_config_internal::Document;
  using Node = yaml_config_internal::Node;
  using Effective = yaml_config_internal::Effective;

  ConfigReader(Document* document, const Node* node, Effective* effective)
      : document_(document), node_(node), effective_(effective) {}

  // The value of a setting, marked as read; null when missing (an error if required).
  const Node* Find(absl::string_view key, bool required);
  const Node* FindScalar(absl::string_view key, bool required, absl::string_view expected);
  void Report(const Node* node, absl::string_view key, absl::string_view message);
  size_t ChoiceIndex(absl::string_view key, const std::vector<absl::string_view>& names,
                     std::optional<size_t> fallback);
  template <typename T, typename Parse, typename Format>
  T Ranged(absl::string_view key, absl::string_view expected, T min, T max,
           const std::optional<T>& fallback, Parse parse, Format format);

  Document* document_;
  const Node* node_;
  Effective* effective_;
};

class YamlConfig {
 public:
  // `file_name` stands in errors. InvalidArgument when `text` is not acceptable YAML.
  static absl::StatusOr<YamlConfig> Parse(absl::string_view text, absl::string_view file_name);
  static absl::StatusOr<YamlConfig> ReadFile(const std::string& path);

  YamlConfig(YamlConfig&&) noexcept;
  YamlConfig& operator=(YamlConfig&&) noexcept;
  ~YamlConfig();

  ConfigReader root();

  // After all settings were read: InvalidArgument with one line for each error, in the order of the
  // file, or OK.
  absl::Status Finish();

  // All settings that were read, with the values they had.
  std::string EffectiveYaml() const;

 private:
  explicit YamlConfig(std::unique_ptr<yaml_config_internal::Document> document);

  std::unique_ptr<yaml_config_internal::Document> document_;
};

}  // namespace palimpsest

#endif  // PALIMPSEST_COMMON_YAML_CONFIG_H_
