// config.json and generation_config.json, separated by a zero byte: whatever they say, a config
// that is accepted can be laid out without overflow.
#include <cstddef>
#include <cstdint>
#include <cstdlib>

#include "absl/strings/string_view.h"
#include "worker/model/image_layout.h"
#include "worker/model/model_config.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const absl::string_view text(reinterpret_cast<const char*>(data), size);
  const size_t zero = text.find('\0');
  const absl::string_view generation =
      zero == absl::string_view::npos ? absl::string_view() : text.substr(zero + 1);
  const auto config = palimpsest::ParseModelConfig(text.substr(0, zero), generation);
  if (!config.ok()) return 0;
  if (config->KvBytes(config->max_position) <= palimpsest::Bytes(0)) std::abort();
  const auto layout = palimpsest::LayOutImage(*config, palimpsest::MiB(2));
  if (layout.ok() && layout->stages.size() != config->num_layers + 2) std::abort();
  return 0;
}
