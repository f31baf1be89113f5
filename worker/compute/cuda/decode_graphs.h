// Executable graphs of decode steps: one for each of a ladder of batch sizes and each way to
// attend. They are built at once, one by one as they are needed, or by a thread behind the steps,
// which starts with what was asked for last.
//
// Threads: Build, BuildAll, BuildBehind and Find are for one thread. `capture` is called on the
// thread that builds.
#ifndef PALIMPSEST_WORKER_COMPUTE_CUDA_DECODE_GRAPHS_H_
#define PALIMPSEST_WORKER_COMPUTE_CUDA_DECODE_GRAPHS_H_

#include <cuda_runtime_api.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <thread>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "common/bytes.h"
#include "common/mutex.h"
#include "worker/compute/cuda/decode_kernel.h"

namespace palimpsest::cuda {

class DecodeGraphs {
 public:
  struct Key {
    int32_t rows = 0;
    DecodeKernel kernel = DecodeKernel::kCudaCores;
    bool split = false;

    friend bool operator==(const Key&, const Key&) = default;
  };
  struct Stats {
    int64_t graphs = 0;
    absl::Duration time;  // building them
    Bytes memory;         // of the GPU, as far as nothing else took or gave any meanwhile
  };
  // Captures a step on `stream`, which has no other work.
  using Capture = std::function<absl::StatusOr<cudaGraph_t>(const Key& key, cudaStream_t stream)>;

  // With GPU `device` current, as when it is destroyed.
  static absl::StatusOr<std::unique_ptr<DecodeGraphs>> Create(int device,
                                                              const std::vector<Key>& keys,
                                                              Capture capture);
  // Waits for the graph that is being built.
  ~DecodeGraphs();

  absl::Status BuildAll();
  // Begins to build all. An error ends it: what is missing stays missing.
  void BuildBehind();
  // If it is missing.
  absl::Status Build(const Key& key);

  // Null: not there yet, or none of the keys.
  cudaGraphExec_t Find(const Key& key);

  Stats stats() const;

 private:
  struct Entry {
    Key key;
    cudaGraphExec_t executable = nullptr;
  };

  DecodeGraphs(int device, Capture capture) : device_(device), capture_(std::move(capture)) {}

  // Of the next one to build: the one wanted, else the first missing.
  std::optional<size_t> NextMissing() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  absl::Status BuildEntry(size_t index);
  absl::StatusOr<cudaGraphExec_t> MakeExecutable(const Key& key) const;
  void Run();

  const int device_;
  const Capture capture_;
  cudaStream_t stream_ = nullptr;
  std::thread thread_;

  mutable Mutex mu_;
  std::vector<Entry> entries_ ABSL_GUARDED_BY(mu_);
  std::optional<size_t> wanted_ ABSL_GUARDED_BY(mu_);
  Stats stats_ ABSL_GUARDED_BY(mu_);
  bool stopping_ ABSL_GUARDED_BY(mu_) = false;
};

}  // namespace palimpsest::cuda

#endif  // PALIMPSEST_WORKER_COMPUTE_CUDA_DECODE_GRAPHS_H_
