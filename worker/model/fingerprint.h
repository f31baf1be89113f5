// What identifies a parameter image: two workers share an image exactly when their fingerprints are
// equal, and KV blocks are keyed by it.
#ifndef PALIMPSEST_WORKER_MODEL_FINGERPRINT_H_
#define PALIMPSEST_WORKER_MODEL_FINGERPRINT_H_

#include <cstdint>
#include <functional>
#include <optional>
#include <string>

#include "absl/status/statusor.h"
#include "common/bytes.h"
#include "worker/model/image_layout.h"

namespace palimpsest {

// What the image depends on besides the files of the folder.
struct PackingSpec {
  uint32_t packing_version = 1;  // kPackingVersion of image_builder.h
  std::string dtype = "bf16";    // of the matrices in the image
  WeightFormat format = WeightFormat::kCpuPanels;
  // Into how many parts the model is cut (tensor_parallel.h).
  int32_t ranks = 1;
  // If set, the weights are those of dummy_weights.h and the folder's are not read.
  std::optional<uint64_t> dummy_seed = std::nullopt;
};

// SHA-256 (32 raw bytes) over `spec`, config.json, generation_config.json, the safetensors index
// and every *.safetensors file in order of name, each framed by the lengths of its name and
// content; without weights, over `spec` and the two configs. Files that are absent count as absent,
// not as empty. Blocks on the disk for as long as it takes to read the weights; `progress` is
// called after each few MiB.
absl::StatusOr<std::string> FingerprintModel(
    const std::string& folder, const PackingSpec& spec,
    const std::function<void(Bytes done, Bytes total)>& progress = nullptr);

}  // namespace palimpsest

#endif  // PALIMPSEST_WORKER_MODEL_FINGERPRINT_H_
