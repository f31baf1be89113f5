// Fills a parameter image from the tensors of a Hugging Face folder, or without one.
#ifndef PALIMPSEST_WORKER_MODEL_IMAGE_BUILDER_H_
#define PALIMPSEST_WORKER_MODEL_IMAGE_BUILDER_H_

#include <cstddef>
#include <cstdint>
#include <functional>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "common/bytes.h"
#include "worker/model/image_layout.h"
#include "worker/model/model_config.h"
#include "worker/model/safetensors.h"

namespace palimpsest {

// Part of the fingerprint. Counts up whenever the same source would give another image: the order
// of tensors, the packing of matrices, the fusing of projections, rounding; or other checksums.
inline constexpr uint32_t kPackingVersion = 2;

// Called on the working thread after every piece of work, at most a few MiB apart.
using ByteProgress = std::function<void(Bytes done, Bytes total)>;

// Checks that the checkpoint holds every tensor of the model, in the right shape and a float type.
// Tensors the model has no use for are refused by name, except those that are known to be derived
// (rotary tables, the second copy of tied embeddings). Errors name tensors and shapes. `layout` is
// LayOutImage's of RankConfig(model, layout.ranks), here and below.
absl::Status CheckTensors(const Checkpoint& checkpoint, const ModelConfig& model,
                          const ImageLayout& layout);

// Writes all tensors of all ranks after CheckTensors. `image` holds layout.image_bytes(), is
// aligned to 64 bytes and is zero: bytes between tensors are left as they are. Needs a few MiB
// besides; blocks on the disk. After an error the image's content is undefined.
absl::Status BuildImage(const Checkpoint& checkpoint, const ModelConfig& model,
                        const ImageLayout& layout, absl::Span<std::byte> image,
                        const ByteProgress& progress = nullptr);

// The same image from the numbers of dummy_weights.h instead of a checkpoint: those of the whole
// model, however many ranks it is cut into.
absl::Status BuildDummyImage(uint64_t seed, const ModelConfig& model, const ImageLayout& layout,
                             absl::Span<std::byte> image, const ByteProgress& progress = nullptr);

}  // namespace palimpsest

#endif  // PALIMPSEST_WORKER_MODEL_IMAGE_BUILDER_H_
