// Reading tensors from Hugging Face model folders: one model.safetensors, or shards listed in
// model.safetensors.index.json. Files are treated as hostile: nothing in them is believed before it
// was checked against the file's size, and a file that shrinks while it is read gives an error.
#ifndef PALIMPSEST_WORKER_MODEL_SAFETENSORS_H_
#define PALIMPSEST_WORKER_MODEL_SAFETENSORS_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/container/btree_map.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "common/bytes.h"
#include "common/fd.h"

namespace palimpsest {

// A tensor as its file describes it.
struct TensorInfo {
  std::string dtype;  // "BF16", "F16", "F32", or another that exists but cannot be read as floats
  std::vector<int64_t> shape;
  int64_t elements = 0;  // product of shape
  Bytes offset;          // from the start of the file
  Bytes size;
  int32_t file = 0;  // which file of the checkpoint
};

using TensorMap = absl::btree_map<std::string, TensorInfo>;

// Checks a header (the JSON between the 8-byte length and the data) against the size of the data
// that follows it: known types, shape and byte range in agreement, no overlap and no hole. Offsets
// of the result count from the start of the data. Format: github.com/huggingface/safetensors.
absl::StatusOr<TensorMap> ParseSafetensorsHeader(absl::string_view json, Bytes data_size);

// Reads and checks the header of an open file of `file_size` bytes. Offsets of the result count
// from the start of the file.
absl::StatusOr<TensorMap> ReadSafetensorsHeader(int fd, Bytes file_size);

// The file of each tensor, from model.safetensors.index.json. Names of files are plain names that
// end in ".safetensors"; anything that could lead out of the folder is refused.
absl::StatusOr<absl::btree_map<std::string, std::string>> ParseSafetensorsIndex(
    absl::string_view json);

// The open files of a model folder. Const methods may be called from several threads; they block on
// the disk.
class Checkpoint {
 public:
  // Opens model.safetensors, or else the shards of model.safetensors.index.json, and checks all
  // headers. NotFound if there is neither.
  static absl::StatusOr<Checkpoint> Open(const std::string& folder);

  const TensorMap& tensors() const { return tensors_; }

  // Reads elements first .. first + out.size() - 1 of a tensor of this checkpoint, in row-major
  // order. Bf16 rounds to nearest even, floats are exact.
  absl::Status ReadBf16(const TensorInfo& tensor, int64_t first, absl::Span<uint16_t> out) const;
  absl::Status ReadFloats(const TensorInfo& tensor, int64_t first, absl::Span<float> out) const;

 private:
  struct File {
    std::string path;
    UniqueFd fd;
  };

  absl::Status AddFile(const std::string& path, TensorMap& tensors);
  absl::Status AddShards(const std::string& folder,
                         const absl::btree_map<std::string, std::string>& weight_map);
  absl::Status ReadRaw(const TensorInfo& tensor, int64_t first, int64_t count, int64_t width,
                       void* out) const;

  std::vector<File> files_;
  TensorMap tensors_;
};

}  // namespace palimpsest

#endif  // PALIMPSEST_WORKER_MODEL_SAFETENSORS_H_
