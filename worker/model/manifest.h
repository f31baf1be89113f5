// The manifest of a parameter image: made by the packer, completed by the broker (fingerprint and
// checksums, once the image is sealed), checked by the worker before it believes a byte of the
// image.
#ifndef PALIMPSEST_WORKER_MODEL_MANIFEST_H_
#define PALIMPSEST_WORKER_MODEL_MANIFEST_H_

#include <cstdint>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/bytes.h"
#include "proto/palimpsest/v1/broker.pb.h"
#include "worker/model/image_layout.h"
#include "worker/model/model_config.h"

namespace palimpsest {

// `config` and `layout` are those of one rank. Without fingerprint and slab_checksums.
// kv_block_tokens is 1 .. 4096, max_sequence_tokens at most the config's max_position, and KV is
// bf16 with latent attention; otherwise InvalidArgument.
absl::StatusOr<v1::ImageManifest> MakeManifest(const ModelConfig& config, const ImageLayout& layout,
                                               int64_t kv_block_tokens,
                                               int64_t max_sequence_tokens);

// Of the whole image, the parts of all ranks. Saturates on a manifest that nobody checked.
Bytes WholeImageBytes(const v1::ImageManifest& manifest);

// Whether a complete manifest describes exactly the image that a worker of this config and layout
// expects. FailedPrecondition names the field that differs.
absl::Status CheckManifest(const v1::ImageManifest& manifest, const ModelConfig& config,
                           const ImageLayout& layout);

}  // namespace palimpsest

#endif  // PALIMPSEST_WORKER_MODEL_MANIFEST_H_
