// Which layers of a config.json have attention, which are recurrent, and which tokens they keep.
// Internal to ParseModelShape.
#ifndef PALIMPSEST_BROKER_CORE_SIZING_MODEL_LAYERS_H_
#define PALIMPSEST_BROKER_CORE_SIZING_MODEL_LAYERS_H_

#include <cstdint>
#include <vector>

#include "broker/core/sizing/model_family.h"
#include "broker/core/sizing/model_shape.h"
#include "common/json_fields.h"

namespace palimpsest {

// One for each of `count` layers; errors go to `fields`.
//
// Kinds are named one by one ("layer_types", "layers_block_type"), by letters
// ("hybrid_override_pattern"), by a pattern that repeats ("block_types"), or by where attention is
// ("attn_layer_period" and "attn_layer_offset", "attn_layer_indices", "full_attention_interval").
// Where that leaves open which tokens an attention layer keeps, "attention_chunk_size" and
// "no_rope_layers", "sliding_window" and "sliding_window_pattern", or the family say it. The last
// "num_kv_shared_layers" read the KV of layers before them.
std::vector<LayerShape> ReadLayers(JsonFields& fields, const ModelFamily& family, int32_t count);

}  // namespace palimpsest

#endif  // PALIMPSEST_BROKER_CORE_SIZING_MODEL_LAYERS_H_
