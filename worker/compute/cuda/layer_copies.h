// What copying a layer from the parameter image takes. Pure: no CUDA.
#ifndef PALIMPSEST_WORKER_COMPUTE_CUDA_LAYER_COPIES_H_
#define PALIMPSEST_WORKER_COMPUTE_CUDA_LAYER_COPIES_H_

#include <cstddef>
#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "common/bytes.h"
#include "common/rotation.h"
#include "worker/core/model_runner.h"
#include "worker/model/image_layout.h"

namespace palimpsest::cuda {

// Bytes of a layer, of row-major weights, from the start of its stage to the end of its last
// tensor: what is read of its slabs.
Bytes LayerBytes(const ImageLayout& layout, int32_t layer);

struct LayerCopy {
  void* to = nullptr;
  const void* from = nullptr;
  size_t bytes = 0;
};
// LayerBytes of the layer that is this stage, from the image to the parameter region: one copy for
// each piece of the image that they lie in.
std::vector<LayerCopy> LayerCopies(const ImageLayout& layout, const ModelMemory& memory, int stage);

// Whether these stages could rotate. InvalidArgument if they are not as ValidateRotation demands,
// or not layers with equally many slabs; FailedPrecondition without an image of all of them.
absl::Status CheckRotation(const ImageLayout& layout, const ModelMemory& memory,
                           const Rotation& rotation);

}  // namespace palimpsest::cuda

#endif  // PALIMPSEST_WORKER_COMPUTE_CUDA_LAYER_COPIES_H_
