// The file that remembers which algorithm each matrix product uses, so that another process on the
// same kind of GPU with the same library chooses alike, and need not measure.
#ifndef PALIMPSEST_WORKER_COMPUTE_CUDA_GEMM_CACHE_H_
#define PALIMPSEST_WORKER_COMPUTE_CUDA_GEMM_CACHE_H_

#include <array>
#include <cstdint>
#include <map>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace palimpsest::cuda {

struct GemmChoice {
  std::array<uint64_t, 8> algorithm = {};  // a cublasLtMatmulAlgo_t
  uint64_t workspace_bytes = 0;
  double microseconds = 0;  // as measured when it was chosen

  friend bool operator==(const GemmChoice&, const GemmChoice&) = default;
};

// Not thread-safe. Keys are free of line breaks and tabs.
class GemmCache {
 public:
  const GemmChoice* Find(const std::string& key) const;
  void Put(const std::string& key, const GemmChoice& choice) { choices_[key] = choice; }
  size_t size() const { return choices_.size(); }

  // One line per choice under a line with the format's version. DataLoss if it is not such a text.
  std::string Serialize() const;
  static absl::StatusOr<GemmCache> Parse(absl::string_view text);

  // A missing file is an empty cache. Store replaces the file atomically.
  static absl::StatusOr<GemmCache> Load(const std::string& path);
  absl::Status Store(const std::string& path) const;

 private:
  std::map<std::string, GemmChoice> choices_;
};

}  // namespace palimpsest::cuda

#endif  // PALIMPSEST_WORKER_COMPUTE_CUDA_GEMM_CACHE_H_
