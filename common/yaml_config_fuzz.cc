// Any bytes as a configuration: no crash, and what is accepted is printed in a form that is
// accepted and printed the same again.
#include <cstdint>
#include <cstdlib>

#include "common/yaml_config.h"

namespace palimpsest {
namespace {

void ReadSomething(ConfigReader reader, int depth) {
  reader.String("name", "x");
  reader.Int("count", -5, 5, 1);
  reader.Double("share", 0, 1, 0.5);
  reader.Bool("pin", false);
  reader.Size("size", Bytes(0), GiB(1), MiB(1));
  reader.Duration("time", absl::ZeroDuration(), absl::Hours(1), absl::Seconds(1));
  reader.Strings("list", 8);
  if (depth == 0) return;
  ReadSomething(reader.Map("map"), depth - 1);
  for (ConfigReader& item : reader.Maps("maps", 4)) ReadSomething(item, depth - 1);
  for (auto& [name, item] : reader.NamedMaps("named", 4)) ReadSomething(item, depth - 1);
}

}  // namespace
}  // namespace palimpsest

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using palimpsest::YamlConfig;
  absl::StatusOr<YamlConfig> yaml =
      YamlConfig::Parse({reinterpret_cast<const char*>(data), size}, "fuzz.yaml");
  if (!yaml.ok()) return 0;
  palimpsest::ReadSomething(yaml->root(), 2);
  if (!yaml->Finish().ok()) return 0;
  const std::string effective = yaml->EffectiveYaml();
  absl::StatusOr<YamlConfig> again = YamlConfig::Parse(effective, "effective.yaml");
  if (!again.ok()) std::abort();
  palimpsest::ReadSomething(again->root(), 2);
  if (!again->Finish().ok() || again->EffectiveYaml() != effective) std::abort();
  return 0;
}
