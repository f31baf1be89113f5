// Is the fused decode attention right on this GPU, and how fast?
//   fused_decode_bench [--check] [--json FILE]
// Checks it against fp64, with sequences of all lengths up to some blocks and caches whose unused
// places are NaN; exits 1 if it is not right. Then times a layer's rotation, append and attention
// beside FlashInfer's kernels for the same: 32 layers as one graph, which no cache can hold.
#include <cstdio>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "worker/compute/cuda/attention.h"
#include "worker/compute/cuda/decode_plan.h"
#include "worker/compute/cuda/fused_decode_case.h"
#include "worker/compute/cuda/kernels.h"

namespace palimpsest::cuda {
namespace {

using bench::Buffer;
using bench::Check;

// FlashInfer's kernels for the same step, by this program's own plan.
class Baseline {
 public:
  Baseline(Device& device, const Step& step)
      : device_(device),
        most_(MaxDecodeTiles(step.sequences(), device.heads.kv_heads, Multiprocessors())),
        tile_sequence_(most_),
        tile_chunk_(most_),
        first_tile_(step.sequences() + 1),
        chunk_tokens_(1),
        counting_(step.sequences() + 1),
        zeros_(most_),
        valid_(most_),
        partial_output_(static_cast<size_t>(most_) * device.heads.heads * device.heads.head_dim),
        partial_lse_(static_cast<size_t>(most_) * device.heads.heads) {
    std::vector<int32_t> sequence(most_), chunk(most_), first(step.sequences() + 1);
    const std::unique_ptr<bool[]> valid(new bool[most_]);
    const int32_t tokens = DecodeChunkTokens(step.lengths, most_);
    split_ = FillDecodeTiles(step.lengths, tokens,
                             {absl::MakeSpan(sequence), absl::MakeSpan(chunk),
                              absl::MakeSpan(valid.get(), most_), absl::MakeSpan(first)});
    std::vector<int32_t> counting(step.sequences() + 1);
    std::iota(counting.begin(), counting.end(), 0);
    Upload(tile_sequence_, sequence);
    Upload(tile_chunk_, chunk);
    Upload(first_tile_, first);
    Upload(chunk_tokens_, {tokens});
    Upload(counting_, counting);
    Check(cudaMemset(zeros_.data(), 0, zeros_.size() * 4), "clear");
    Check(cudaMemcpy(valid_.data(), valid.get(), most_, cudaMemcpyHostToDevice), "upload");
  }

  void Launch(DecodeKernel kernel, int32_t layer, cudaStream_t stream) {
    const Heads& heads = device_.heads;
    auto* keys = device_.kv.data() + 2 * layer * heads.plane();
    RopeAppendArgs rope;
    rope.qkv = device_.qkv.data();
    rope.rotations = device_.rotations.data();
    rope.kv_slots = device_.slots.data();
    rope.keys = keys;
    rope.values = keys + heads.plane();
    rope.rows = device_.sequences;
    rope.heads = heads.heads;
    rope.kv_heads = heads.kv_heads;
    rope.half_dim = heads.head_dim / 2;
    Check(RopeAppend(rope, stream), "rotate");
    PagedKv kv;
    kv.keys = rope.keys;
    kv.values = rope.values;
    kv.page_stride = Step::BlockElements(heads, device_.layers);
    kv.block_tokens = kBlockTokens;
    kv.kv_heads = heads.kv_heads;
    kv.head_dim = heads.head_dim;
    kv.sequences = device_.sequences;
    kv.indices = device_.indices.data();
    kv.indptr = device_.indptr.data();
    kv.last_block_len = device_.last.data();
    Queries queries;
    queries.query = device_.qkv.data();
    queries.query_stride = heads.row();
    queries.output = device_.output.data();
    queries.heads = heads.heads;
    queries.scale = 0.1f;
    DecodeWork work;
    work.tiles = split_ ? most_ : device_.sequences;
    work.tile_sequence = tile_sequence_.data();
    work.tile_chunk = tile_chunk_.data();
    work.first_tile = first_tile_.data();
    work.chunk_tokens = chunk_tokens_.data();
    work.valid_tiles = valid_.data();
    work.partial_output = split_ ? partial_output_.data() : nullptr;
    work.partial_lse = split_ ? partial_lse_.data() : nullptr;
    work.counting = counting_.data();
    work.zeros = zeros_.data();
    Check(DecodeAttention(kernel, queries, kv, work, true, stream).code, "FlashInfer");
  }

 private:
  Device& device_;
  const int32_t most_;
  bool split_ = false;
  Buffer<int32_t> tile_sequence_, tile_chunk_, first_tile_, chunk_tokens_, counting_, zeros_;
  Buffer<bool> valid_;
  Buffer<__nv_bfloat16> partial_output_;
  Buffer<float> partial_lse_;
};

void Time(const Heads& heads, int32_t sequences, int32_t context, std::string& json) {
  constexpr int32_t kLayers = 32;
  const int32_t blocks = sequences * ((context + kBlockTokens - 1) / kBlockTokens);
  const Step step(heads, kLayers, std::vector<int32_t>(sequences, context), blocks);
  Device device(heads, kLayers, step, blocks);
  bench::Fill(device.kv.data(), device.kv.size(), 1, 0, 1);
  bench::Fill(device.qkv.data(), device.qkv.size(), 1, 0, 2);
  Check(cudaMemset(device.rotations.data(), 0, device.rotations.size() * 8), "rotations");
  Baseline baseline(device, step);
  const double bytes = 2.0 * 2 * context * static_cast<double>(heads.token()) * sequences;
  char line[256];
  std::snprintf(line, sizeof(line), "%s\n  {\"sequences\": %d, \"context\": %d, \"bytes\": %.0f",
                json.empty() ? "" : ",", sequences, context, bytes);
  json += line;
  const auto report = [&](const char* name, double us) {
    std::printf("%4d sequences of %5d  %-16s %8.2f us  %6.0f GB/s\n", sequences, context, name, us,
                bytes / us * 1e-3);
    std::snprintf(line, sizeof(line), ", \"%s_us\": %.2f", name, us);
    json += line;
  };
  const int32_t multiprocessors = Multiprocessors();
  report("fused", bench::TimeGraph(kLayers, 9, [&](int layer, cudaStream_t stream) {
           device.Launch(layer, true, multiprocessors, stream);
         }));
  for (const DecodeKernel kernel : {DecodeKernel::kCudaCores, DecodeKernel::kTensorCores}) {
    baseline.Launch(kernel, 0, nullptr);  // loads the kernels
    Check(cudaDeviceSynchronize(), "FlashInfer");
    report(kernel == DecodeKernel::kCudaCores ? "cuda_cores" : "tensor_cores",
           bench::TimeGraph(kLayers, 9, [&](int layer, cudaStream_t stream) {
             baseline.Launch(kernel, layer, stream);
           }));
  }
  json += "}";
  std::fflush(stdout);
}

constexpr Heads kLlama3 = {32, 8, 128};

int Run(bool check_only, const char* json_path) {
  double error = 0;
  const bool passed = CheckFusedDecode(&error);
  std::printf("check %s, largest error %.2e\n", passed ? "passed" : "FAILED", error);
  if (check_only) return passed ? 0 : 1;
  std::string json;
  for (const int32_t sequences : {1, 4, 8, 16, 32, 64, 128, 192, 256}) {
    Time(kLlama3, sequences, 257, json);
  }
  for (const int32_t sequences : {1, 8, 32}) Time(kLlama3, sequences, 4000, json);
  if (json_path != nullptr) {
    FILE* file = std::fopen(json_path, "w");
    if (file == nullptr) {
      std::fprintf(stderr, "cannot write %s: give --json a path in an existing folder\n",
                   json_path);
      return 1;
    }
    std::fprintf(file, "{\"passed\": %s, \"error\": %.3e, \"times\": [%s]}\n",
                 passed ? "true" : "false", error, json.c_str());
    std::fclose(file);
  }
  return passed ? 0 : 1;
}

}  // namespace
}  // namespace palimpsest::cuda

int main(int argc, char** argv) {
  const char* json = nullptr;
  bool check_only = false;
  for (int i = 1; i < argc; ++i) {
    if (std::strcmp(argv[i], "--check") == 0) {
      check_only = true;
    } else if (std::strcmp(argv[i], "--json") == 0 && i + 1 < argc) {
      json = argv[++i];
    } else {
      std::fprintf(stderr, "usage: %s [--check] [--json FILE]\n", argv[0]);
      return 2;
    }
  }
  return palimpsest::cuda::Run(check_only, json);
}
