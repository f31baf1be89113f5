#include "worker/compute/cuda/collective_bench.h"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <bit>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <iostream>
#include <memory>
#include <utility>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "common/cuda/status.h"
#include "worker/compute/cuda/gpu_collectives.h"
#include "worker/compute/cuda/kernels.h"
#include "worker/compute/cuda/rank_team.h"

namespace palimpsest::cuda {
namespace {

using Json = nlohmann::ordered_json;

// Logits of 256 rows of Llama 3.
constexpr int32_t kVocabulary = 128256;
constexpr size_t kLargest = size_t{256} * kVocabulary * sizeof(float);
constexpr int kCallsOfGraph = 64;

float ToFloat(uint16_t bits) { return std::bit_cast<float>(static_cast<uint32_t>(bits) << 16); }

uint16_t ToBfloat16(float value) {
  const auto bits = std::bit_cast<uint32_t>(value);
  return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

// The GPUs with a stream and two buffers each, on threads of their own.
class Exchange {
 public:
  static absl::StatusOr<std::unique_ptr<Exchange>> Create(const GpuCollectivesOptions& options) {
    auto exchange = std::unique_ptr<Exchange>(new Exchange(options.devices));
    auto group = GpuCollectives::Create(options, &exchange->meeting_);
    if (!group.ok()) return group.status();
    exchange->group_ = *std::move(group);
    absl::Status status = exchange->Each([&](Rank& rank, Collective&) {
      absl::Status made = CudaStatus(cudaMalloc(&rank.data, kLargest), "buffer");
      made.Update(CudaStatus(cudaMalloc(&rank.whole, kLargest), "buffer"));
      made.Update(
          CudaStatus(cudaStreamCreateWithFlags(&rank.stream, cudaStreamNonBlocking), "stream"));
      made.Update(CudaStatus(cudaEventCreate(&rank.begin), "event"));
      made.Update(CudaStatus(cudaEventCreate(&rank.end), "event"));
      return made;
    });
    if (!status.ok()) return status;
    return exchange;
  }

  ~Exchange() {
    Each([](Rank& rank, Collective&) {
      cudaStreamDestroy(rank.stream);
      cudaEventDestroy(rank.begin);
      cudaEventDestroy(rank.end);
      cudaFree(rank.data);
      cudaFree(rank.whole);
      return absl::OkStatus();
    }).IgnoreError();
  }

  bool direct() const { return group_->direct(); }
  int nccl_version() const { return group_->nccl_version(); }

  // Whether the sum of random numbers has the host's bits on all ranks, for two ranks, or the same
  // bits on all, for more.
  absl::StatusOr<bool> SumIsRight(size_t count) {
    std::vector<std::vector<uint16_t>> before(ranks_.size(), std::vector<uint16_t>(count));
    std::vector<std::vector<uint16_t>> after = before;
    absl::Status status = Each([&](Rank& rank, Collective& collective) {
      absl::Status done =
          CudaStatus(FillUniform(rank.data, static_cast<int64_t>(count), 0, 1,
                                 static_cast<uint64_t>(collective.rank()) + 7, rank.stream),
                     "fill");
      done.Update(Read(rank, rank.data, before[collective.rank()]));
      if (done.ok())
        done = collective.AllReduce(rank.data, static_cast<int64_t>(count), rank.stream);
      done.Update(Read(rank, rank.data, after[collective.rank()]));
      return done;
    });
    if (!status.ok()) return status;
    for (const auto& other : after) {
      if (other != after.front()) return false;
    }
    for (size_t i = 0; before.size() == 2 && i < count; ++i) {
      if (after[0][i] != ToBfloat16(ToFloat(before[0][i]) + ToFloat(before[1][i]))) return false;
    }
    return true;
  }

  // Whether AllReduceNorm gives what a sum and a norm give: the same sums, norms within the last
  // bit.
  absl::StatusOr<bool> NormIsRight(int32_t rows, int32_t size) {
    const size_t count = static_cast<size_t>(rows) * size;
    std::vector<char> right(ranks_.size());
    absl::Status status = Each([&](Rank& rank, Collective& collective) {
      auto* sums = static_cast<uint16_t*>(rank.data);
      auto* norms = static_cast<uint16_t*>(rank.whole);
      uint16_t* const weight = norms + 2 * count;
      const auto seed = static_cast<uint64_t>(collective.rank()) + 5;
      absl::Status done = CudaStatus(FillUniform(weight, size, 1, 0.5f, 1, rank.stream), "fill");
      for (int i : {0, 1}) {
        done.Update(CudaStatus(
            FillUniform(sums + i * count, static_cast<int64_t>(count), 0, 1, seed, rank.stream),
            "fill"));
      }
      if (done.ok()) {
        done = collective.AllReduceNorm(sums, {weight, norms, rows, size, 1e-5f}, rank.stream);
      }
      if (done.ok()) {
        done = collective.AllReduce(sums + count, static_cast<int64_t>(count), rank.stream);
      }
      RmsNormArgs args;
      args.input = sums + count;
      args.weight = weight;
      args.output = norms + count;
      args.rows = rows;
      args.size = size;
      args.epsilon = 1e-5f;
      done.Update(CudaStatus(RmsNorm(args, rank.stream), "norm"));
      std::vector<uint16_t> got(2 * count), normed(2 * count);
      done.Update(Read(rank, sums, got));
      done.Update(Read(rank, norms, normed));
      bool same = std::equal(got.begin(), got.begin() + static_cast<int64_t>(count),
                             got.begin() + static_cast<int64_t>(count));
      for (size_t i = 0; i < count; ++i) {
        same = same && std::abs(int{normed[i]} - int{normed[count + i]}) <= 1;
      }
      right[collective.rank()] = same;
      return done;
    });
    if (!status.ok()) return status;
    return std::all_of(right.begin(), right.end(), [](char r) { return r != 0; });
  }
  bool JoinsNorm(int32_t rows, int32_t size) { return group_->rank(0).JoinsNorm(rows, size); }

  // Whether matrices come to stand side by side; `columns` of the last rank are cut by `cut`.
  absl::StatusOr<bool> GatherIsRight(int32_t rows, int32_t columns, int32_t cut) {
    const auto ranks = static_cast<int32_t>(ranks_.size());
    const int32_t width = columns * ranks - cut;
    const size_t part = static_cast<size_t>(rows) * columns;
    std::vector<std::vector<float>> parts(ranks_.size(), std::vector<float>(part));
    std::vector<std::vector<float>> wholes(ranks_.size(),
                                           std::vector<float>(static_cast<size_t>(rows) * width));
    absl::Status status = Each([&](Rank& rank, Collective& collective) {
      auto* own = static_cast<float*>(rank.data) + static_cast<size_t>(collective.rank()) * part;
      absl::Status done =
          CudaStatus(FillUniform(own, static_cast<int64_t>(part) * 2, 0, 1,
                                 static_cast<uint64_t>(collective.rank()) + 3, rank.stream),
                     "fill");
      done.Update(Read(rank, own, parts[collective.rank()]));
      if (done.ok()) {
        done = collective.AllGather(static_cast<float*>(rank.data), static_cast<float*>(rank.whole),
                                    rows, columns, width, rank.stream);
      }
      done.Update(Read(rank, rank.whole, wholes[collective.rank()]));
      return done;
    });
    if (!status.ok()) return status;
    for (const std::vector<float>& whole : wholes) {
      for (int32_t row = 0; row < rows; ++row) {
        for (int32_t c = 0; c < width; ++c) {
          const float expected =
              parts[c / columns][static_cast<size_t>(row) * columns + c % columns];
          if (std::bit_cast<uint32_t>(whole[static_cast<size_t>(row) * width + c]) !=
              std::bit_cast<uint32_t>(expected)) {
            return false;
          }
        }
      }
    }
    return true;
  }

  // Microseconds of one call among many, in a graph: as a decode step has them.
  using Call =
      absl::FunctionRef<absl::Status(void* data, void* whole, Collective&, cudaStream_t stream)>;
  absl::StatusOr<double> Microseconds(Call call) {
    constexpr int kLaunches = 8;
    std::vector<double> times(ranks_.size());
    absl::Status status = Each([&](Rank& rank, Collective& collective) {
      cudaGraph_t graph = nullptr;
      cudaGraphExec_t executable = nullptr;
      absl::Status done = CudaStatus(cudaMemsetAsync(rank.data, 0, kLargest, rank.stream), "clear");
      done.Update(CudaStatus(cudaStreamBeginCapture(rank.stream, cudaStreamCaptureModeThreadLocal),
                             "begin a capture"));
      for (int i = 0; done.ok() && i < kCallsOfGraph; ++i) {
        done = call(rank.data, rank.whole, collective, rank.stream);
      }
      done.Update(CudaStatus(cudaStreamEndCapture(rank.stream, &graph), "end a capture"));
      if (done.ok()) done = CudaStatus(cudaGraphInstantiate(&executable, graph, 0), "graph");
      for (int i = -2; done.ok() && i < kLaunches; ++i) {
        if (i == 0) done = CudaStatus(cudaEventRecord(rank.begin, rank.stream), "event");
        done.Update(CudaStatus(cudaGraphLaunch(executable, rank.stream), "launch"));
      }
      done.Update(CudaStatus(cudaEventRecord(rank.end, rank.stream), "event"));
      done.Update(CudaStatus(cudaStreamSynchronize(rank.stream), "graph"));
      float milliseconds = 0;
      done.Update(CudaStatus(cudaEventElapsedTime(&milliseconds, rank.begin, rank.end), "event"));
      times[collective.rank()] = milliseconds * 1e3 / kLaunches / kCallsOfGraph;
      if (executable != nullptr) cudaGraphExecDestroy(executable);
      if (graph != nullptr) cudaGraphDestroy(graph);
      return done;
    });
    if (!status.ok()) return status;
    return *std::max_element(times.begin(), times.end());
  }

  // Milliseconds after which rank 0's sum has ended that no other rank takes part in.
  absl::StatusOr<double> Abort(size_t count) {
    using Clock = std::chrono::steady_clock;
    Clock::time_point aborted;
    absl::Status status = Each([&](Rank& rank, Collective& collective) {
      if (collective.rank() > 0) {
        aborted = Clock::now();
        if (collective.rank() == 1) collective.Abort(absl::AbortedError("a check's"));
        return absl::OkStatus();
      }
      absl::Status done = collective.AllReduce(rank.data, static_cast<int64_t>(count), rank.stream);
      // An abort that comes before the call is reported by it.
      if (!done.ok() && collective.status().ok()) return done;
      return CudaStatus(cudaStreamSynchronize(rank.stream), "sum of an aborted rank");
    });
    if (!status.ok()) return status;
    return std::chrono::duration<double, std::milli>(Clock::now() - aborted).count();
  }

 private:
  struct Rank {
    void* data = nullptr;
    void* whole = nullptr;
    cudaStream_t stream = nullptr;
    cudaEvent_t begin = nullptr;
    cudaEvent_t end = nullptr;
  };

  explicit Exchange(const std::vector<int>& devices)
      : devices_(devices),
        meeting_(static_cast<int>(devices.size())),
        team_(static_cast<int>(devices.size())),
        ranks_(devices.size()) {}

  absl::Status Each(absl::FunctionRef<absl::Status(Rank&, Collective&)> call) {
    std::vector<absl::Status> statuses(ranks_.size());
    team_.Run([&](int rank) {
      statuses[rank] = CudaStatus(cudaSetDevice(devices_[rank]), "choose the GPU");
      if (statuses[rank].ok()) statuses[rank] = call(ranks_[rank], group_->rank(rank));
    });
    for (const absl::Status& status : statuses) {
      if (!status.ok()) return status;
    }
    return absl::OkStatus();
  }

  template <typename T>
  static absl::Status Read(const Rank& rank, const void* from, std::vector<T>& to) {
    absl::Status status = CudaStatus(cudaMemcpyAsync(to.data(), from, to.size() * sizeof(T),
                                                     cudaMemcpyDeviceToHost, rank.stream),
                                     "read");
    status.Update(CudaStatus(cudaStreamSynchronize(rank.stream), "read"));
    return status;
  }

  const std::vector<int> devices_;
  RankMeeting meeting_;
  RankTeam team_;
  std::vector<Rank> ranks_;
  std::unique_ptr<GpuCollectives> group_;
};

}  // namespace

absl::StatusOr<Json> MeasureCollectives(const std::vector<int>& devices) {
  // Contexts are not the exchange's.
  for (const int device : devices) {
    absl::Status status = CudaStatus(cudaSetDevice(device), "choose the GPU");
    status.Update(CudaStatus(cudaFree(nullptr), "context"));
    if (!status.ok()) return status;
  }
  size_t before = 0, after = 0, total = 0;
  GpuCollectivesOptions options;
  options.devices = devices;
  Json out = {{"gpus", devices.size()}};
  bool ok = true;
  for (const bool direct : {true, false}) {
    if (!direct) options.max_direct_sum_bytes = options.max_direct_gather_bytes = 0;
    cudaMemGetInfo(&before, &total);
    auto exchange = Exchange::Create(options);
    if (!exchange.ok()) return exchange.status();
    cudaMemGetInfo(&after, &total);
    Json json = {{"gpu_bytes", before - after - 2 * kLargest}};
    out["nccl_version"] = (*exchange)->nccl_version();
    if (direct && !(*exchange)->direct()) {
      out["direct"] = "these GPUs cannot write each other's memory";
      continue;
    }
    for (const size_t count : {8, 4096, 12288, 131072 + 8, 1048576, 4194304, 16777216}) {
      auto right = (*exchange)->SumIsRight(count);
      if (!right.ok()) return right.status();
      ok = ok && *right;
      if (!*right) json["wrong_sums"].push_back(count);
    }
    for (const auto& [rows, columns, cut] :
         {std::tuple(1, 64128, 0), {3, 504, 5}, {17, 504, 5}, {32, 64128, 0}, {100, 64128, 0}}) {
      auto right = (*exchange)->GatherIsRight(rows, columns, cut);
      if (!right.ok()) return right.status();
      ok = ok && *right;
      if (!*right) json["wrong_gathers"].push_back({rows, columns, cut});
    }
    for (const auto& [rows, size] : {std::pair(1, 64), {17, 576}, {32, 4096}, {256, 8192}}) {
      if (!(*exchange)->JoinsNorm(rows, size)) continue;
      auto right = (*exchange)->NormIsRight(rows, size);
      if (!right.ok()) return right.status();
      ok = ok && *right;
      if (!*right) json["wrong_norms"].push_back({rows, size});
      auto time = (*exchange)->Microseconds(
          // By name: clang-tidy 14 captures no structured bindings.
          [rows = rows, size = size](void* data, void* whole, Collective& collective,
                                     cudaStream_t stream) {
            return collective.AllReduceNorm(data, {whole, whole, rows, size, 1e-5f}, stream);
          });
      if (!time.ok()) return time.status();
      json["all_reduce_norm"].push_back({{"rows", rows}, {"size", size}, {"us", *time}});
    }
    for (size_t bytes = size_t{8} << 10; bytes <= size_t{32} << 20; bytes *= 2) {
      auto time = (*exchange)->Microseconds(
          [&](void* data, void*, Collective& collective, cudaStream_t stream) {
            return collective.AllReduce(data, static_cast<int64_t>(bytes / 2), stream);
          });
      if (!time.ok()) return time.status();
      json["all_reduce"].push_back({{"bytes", bytes}, {"us", *time}});
      std::cerr << (direct ? "direct " : "nccl ") << json["all_reduce"].back() << std::endl;
    }
    for (const int32_t rows : {1, 8, 32, 128, 256}) {
      auto time = (*exchange)->Microseconds(
          [&](void* data, void* whole, Collective& collective, cudaStream_t stream) {
            return collective.AllGather(static_cast<float*>(data), static_cast<float*>(whole), rows,
                                        kVocabulary / collective.ranks(), kVocabulary, stream);
          });
      if (!time.ok()) return time.status();
      json["all_gather_of_logits"].push_back({{"rows", rows}, {"us", *time}});
      std::cerr << (direct ? "direct " : "nccl ") << json["all_gather_of_logits"].back()
                << std::endl;
    }
    auto time = (*exchange)->Abort(direct ? 4096 : 4194304);
    if (!time.ok()) return time.status();
    json["abort_ms"] = *time;
    out[direct ? "direct" : "nccl"] = std::move(json);
  }
  out["ok"] = ok;
  return out;
}

}  // namespace palimpsest::cuda
