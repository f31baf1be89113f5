// Writes a parameter image into a memfd. Runs in a process of its own, under the broker's identity:
// whatever a hostile model folder does to the parser happens there, and no tenant can touch the
// result before the broker has sealed it.
#ifndef PALIMPSEST_WORKER_MODEL_PACKER_H_
#define PALIMPSEST_WORKER_MODEL_PACKER_H_

#include <cstdint>
#include <optional>
#include <string>

#include "absl/status/status.h"
#include "common/bytes.h"
#include "worker/model/image_layout.h"
#include "worker/model/model_config.h"

namespace palimpsest {

struct PackRequest {
  std::string model_folder;
  Bytes slab_bytes;
  int64_t kv_block_tokens = 0;
  KvDtype kv_dtype = KvDtype::kBf16;
  int64_t max_sequence_tokens = 0;
  WeightFormat format = WeightFormat::kCpuPanels;
  // Parts of the image, one after another (tensor_parallel.h).
  int32_t ranks = 1;
  // If set, the weights are generated (dummy_weights.h); the folder needs none.
  std::optional<uint64_t> dummy_seed;
  // Borrowed descriptors of the caller.
  int output_fd = -1;    // memfd; its content is replaced
  int manifest_fd = -1;  // gets one serialized v1::ImageManifest (see MakeManifest)
  int progress_fd = -1;  // if not negative, gets lines "pack DONE TOTAL" in bytes
};

// Sets the memfd's size, writes the image, unmaps it (so that it can be sealed), then writes the
// manifest. Nothing is written to manifest_fd unless the image is complete.
absl::Status Pack(const PackRequest& request);

}  // namespace palimpsest

#endif  // PALIMPSEST_WORKER_MODEL_PACKER_H_
