// What config.json leaves to the defaults of its model's class in transformers, as far as KV
// depends on it. Internal to ParseModelShape.
#ifndef PALIMPSEST_BROKER_CORE_SIZING_MODEL_FAMILY_H_
#define PALIMPSEST_BROKER_CORE_SIZING_MODEL_FAMILY_H_

#include <cstdint>

#include "absl/strings/string_view.h"
#include "common/json_fields.h"

namespace palimpsest {

// Which attention layers a model's window binds where config.json lists none.
enum class WindowRule {
  kUnknown,      // "sliding_window" is refused
  kAll,          // every layer
  kPeriodic,     // all but every n-th, n being "sliding_window_pattern"
  kBehindFirst,  // with "use_sliding_window", those from "max_window_layers" on
};

// What a model's layers are where config.json does not say.
enum class LayerRule {
  kAttention,
  kRecurrent,          // every layer
  kBoth,               // side by side in every layer
  kPeriodicAttention,  // recurrent, but every n-th, n being "full_attention_interval"
};

struct ModelFamily {
  absl::string_view name;  // model_type without '_' and "text"
  // 0: none.
  int32_t heads = 0;
  int32_t kv_heads = 0;
  int32_t head_dim = 0;
  int32_t window = 0;
  int32_t period = 0;  // of the layers that see all tokens
  WindowRule windows = WindowRule::kUnknown;
  LayerRule layers = LayerRule::kAttention;
};

// By "model_type" or, without one, "architectures"; a family without defaults if neither is known.
const ModelFamily& FindModelFamily(const JsonFields& fields);

}  // namespace palimpsest

#endif  // PALIMPSEST_BROKER_CORE_SIZING_MODEL_FAMILY_H_
