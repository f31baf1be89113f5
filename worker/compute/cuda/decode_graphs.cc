#include "worker/compute/cuda/decode_graphs.h"

#include <algorithm>
#include <utility>

#include "common/cuda/status.h"
#include "common/log.h"
#include "common/monotonic_time.h"

namespace palimpsest::cuda {
namespace {

Bytes FreeMemory() {
  size_t free = 0, total = 0;
  if (cudaMemGetInfo(&free, &total) != cudaSuccess) return Bytes(0);
  return Bytes(static_cast<int64_t>(free));
}

}  // namespace

absl::StatusOr<std::unique_ptr<DecodeGraphs>> DecodeGraphs::Create(int device,
                                                                   const std::vector<Key>& keys,
                                                                   Capture capture) {
  std::unique_ptr<DecodeGraphs> graphs(new DecodeGraphs(device, std::move(capture)));
  absl::Status status = CudaStatus(
      cudaStreamCreateWithFlags(&graphs->stream_, cudaStreamNonBlocking), "stream of graphs");
  if (!status.ok()) return status;
  MutexLock lock(&graphs->mu_);
  for (const Key& key : keys) graphs->entries_.push_back({key, nullptr});
  return graphs;
}

DecodeGraphs::~DecodeGraphs() {
  {
    MutexLock lock(&mu_);
    stopping_ = true;
  }
  if (thread_.joinable()) thread_.join();
  std::vector<Entry> entries;
  {
    MutexLock lock(&mu_);
    entries.swap(entries_);
  }
  for (const Entry& entry : entries) {
    if (entry.executable != nullptr) cudaGraphExecDestroy(entry.executable);
  }
  if (stream_ != nullptr) cudaStreamDestroy(stream_);
}

std::optional<size_t> DecodeGraphs::NextMissing() {
  if (stopping_) return std::nullopt;
  const std::optional<size_t> wanted = std::exchange(wanted_, std::nullopt);
  if (wanted.has_value() && entries_[*wanted].executable == nullptr) return wanted;
  for (size_t i = 0; i < entries_.size(); ++i) {
    if (entries_[i].executable == nullptr) return i;
  }
  return std::nullopt;
}

absl::StatusOr<cudaGraphExec_t> DecodeGraphs::MakeExecutable(const Key& key) const {
  absl::StatusOr<cudaGraph_t> graph = capture_(key, stream_);
  if (!graph.ok()) return graph.status();
  cudaGraphExec_t executable = nullptr;
  absl::Status status =
      CudaStatus(cudaGraphInstantiate(&executable, *graph, 0), "instantiate a graph");
  cudaGraphDestroy(*graph);
  if (!status.ok()) return status;
  status = CudaStatus(cudaGraphUpload(executable, stream_), "upload a graph");
  status.Update(CudaStatus(cudaStreamSynchronize(stream_), "upload a graph"));
  if (status.ok()) return executable;
  cudaGraphExecDestroy(executable);
  return status;
}

absl::Status DecodeGraphs::BuildEntry(size_t index) {
  Key key;
  {
    MutexLock lock(&mu_);
    key = entries_[index].key;
  }
  const absl::Time start = MonotonicNow();
  const Bytes before = FreeMemory();
  const absl::StatusOr<cudaGraphExec_t> executable = MakeExecutable(key);
  if (!executable.ok()) return executable.status();
  const Bytes taken = before - FreeMemory();
  const absl::Duration time = MonotonicNow() - start;
  MutexLock lock(&mu_);
  entries_[index].executable = *executable;
  ++stats_.graphs;
  stats_.time += time;
  stats_.memory += taken;
  return absl::OkStatus();
}

absl::Status DecodeGraphs::Build(const Key& key) {
  std::optional<size_t> missing;
  {
    MutexLock lock(&mu_);
    for (size_t i = 0; i < entries_.size(); ++i) {
      if (entries_[i].key == key && entries_[i].executable == nullptr) missing = i;
    }
  }
  return missing.has_value() ? BuildEntry(*missing) : absl::OkStatus();
}

absl::Status DecodeGraphs::BuildAll() {
  for (;;) {
    std::optional<size_t> next;
    {
      MutexLock lock(&mu_);
      next = NextMissing();
    }
    if (!next.has_value()) return absl::OkStatus();
    if (absl::Status status = BuildEntry(*next); !status.ok()) return status;
  }
}

void DecodeGraphs::BuildBehind() {
  thread_ = std::thread([this] { Run(); });
}

void DecodeGraphs::Run() {
  absl::Status status = CudaStatus(cudaSetDevice(device_), "choose the GPU");
  if (status.ok()) status = BuildAll();
  const Stats built = stats();
  if (!status.ok()) {
    Log(LogLevel::kWarning, "decode steps run without graphs: building them failed",
        {{"error", status}, {"graphs", built.graphs}});
    return;
  }
  Log(LogLevel::kInfo, "graphs for rotating layers",
      {{"graphs", built.graphs},
       {"seconds", absl::ToDoubleSeconds(built.time)},
       {"memory", built.memory}});
}

cudaGraphExec_t DecodeGraphs::Find(const Key& key) {
  MutexLock lock(&mu_);
  for (size_t i = 0; i < entries_.size(); ++i) {
    if (!(entries_[i].key == key)) continue;
    if (entries_[i].executable == nullptr) wanted_ = i;
    return entries_[i].executable;
  }
  return nullptr;
}

DecodeGraphs::Stats DecodeGraphs::stats() const {
  MutexLock lock(&mu_);
  return stats_;
}

}  // namespace palimpsest::cuda
