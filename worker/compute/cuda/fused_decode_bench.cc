// Is the fused decode attention right on this GPU, and how fast?
//   fused_decode_bench [--check] [--json FILE]
// Checks it against fp64, with sequences of all lengths up to some blocks and caches whose unused
// places are NaN; exits 1 if it is not right. Then times a layer's rotation, append and attention
// beside FlashInfer's kernels for the same: 32 layers as one graph, which no cache can hold.
#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "worker/compute/cuda/attention.h"
#include "worker/compute/cuda/bench_device.h"
#include "worker/compute/cuda/decode_plan.h"
#include "worker/compute/cuda/fused_decode.h"
#include "worker/compute/cuda/kernels.h"

namespace palimpsest::cuda {
namespace {

using bench::Buffer;
using bench::Check;

constexpr int32_t kBlockTokens = 16;

struct Heads {
  int32_t heads;
  int32_t kv_heads;
  int32_t head_dim;

  int32_t group() const { return heads / kv_heads; }
  int64_t row() const { return int64_t{heads + 2 * kv_heads} * head_dim; }
  int64_t token() const { return int64_t{kv_heads} * head_dim; }
  int64_t plane() const { return kBlockTokens * token(); }
};

template <typename T>
void Upload(Buffer<T>& to, const std::vector<T>& from) {
  Check(cudaMemcpy(to.data(), from.data(), from.size() * sizeof(T), cudaMemcpyHostToDevice),
        "upload");
}

float Rounded(float value) { return __bfloat162float(__float2bfloat16(value)); }

int32_t Multiprocessors() {
  int count = 0;
  Check(cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, 0), "multiprocessors");
  return count;
}

// The blocks of a step's sequences: ids in no order, each sequence's newest token in place.
struct Step {
  std::vector<int32_t> lengths, indices, indptr, last;
  std::vector<int64_t> slots;

  Step(const Heads& heads, int32_t layers, std::vector<int32_t> of, int32_t blocks)
      : lengths(std::move(of)), indptr{0} {
    std::vector<int32_t> ids(static_cast<size_t>(blocks));
    std::iota(ids.begin(), ids.end(), 0);
    std::shuffle(ids.begin(), ids.end(), std::mt19937(7));
    for (const int32_t length : lengths) {
      for (int32_t t = 0; t < length; t += kBlockTokens) {
        indices.push_back(ids[indices.size()]);
      }
      indptr.push_back(static_cast<int32_t>(indices.size()));
      last.push_back((length - 1) % kBlockTokens + 1);
      slots.push_back(indices.back() * BlockElements(heads, layers) +
                      (last.back() - 1) * heads.token());
    }
  }

  static int64_t BlockElements(const Heads& heads, int32_t layers) {
    return heads.plane() * 2 * layers;
  }
  int32_t sequences() const { return static_cast<int32_t>(lengths.size()); }
};

// A step in device memory.
struct Device {
  Device(const Heads& h, int32_t layer_count, const Step& step, int32_t block_count)
      : heads(h),
        layers(layer_count),
        sequences(step.sequences()),
        blocks(block_count),
        kv(static_cast<size_t>(Step::BlockElements(h, layer_count) * block_count)),
        qkv(static_cast<size_t>(h.row() * sequences)),
        output(static_cast<size_t>(sequences) * h.heads * h.head_dim),
        rotations(static_cast<size_t>(sequences) * h.head_dim / 2),
        indices(step.indices.size()),
        indptr(step.indptr.size()),
        last(step.last.size()),
        slots(step.slots.size()),
        arrivals(static_cast<size_t>(sequences) * h.kv_heads),
        partials(FusedDecodePartialBytes(h.head_dim, Multiprocessors())) {
    Upload(indices, step.indices);
    Upload(indptr, step.indptr);
    Upload(last, step.last);
    Upload(slots, step.slots);
    Check(cudaMemset(arrivals.data(), 0, arrivals.size() * 4), "clear");
    cache.kv = kv.data();
    cache.block_bytes = Step::BlockElements(h, layers) * 2;
    cache.blocks = blocks;
    cache.layers = layers;
    cache.heads = h.heads;
    cache.kv_heads = h.kv_heads;
    cache.head_dim = h.head_dim;
    cache.block_tokens = kBlockTokens;
    Check(PrepareFusedDecode(cache, sequences, &map), "prepare");
  }

  void Launch(int32_t layer, bool append, int32_t multiprocessors, cudaStream_t stream) {
    FusedDecode decode;
    decode.cache = &cache;
    decode.map = &map;
    decode.layer = layer;
    decode.sequences = decode.max_sequences = sequences;
    decode.multiprocessors = multiprocessors;
    decode.qkv = qkv.data();
    decode.rotations = append ? rotations.data() : nullptr;
    decode.kv_slots = slots.data();
    decode.indices = indices.data();
    decode.indptr = indptr.data();
    decode.last_block_len = last.data();
    decode.output = output.data();
    decode.scale = 1.0f / std::sqrt(static_cast<float>(heads.head_dim));
    decode.partials = partials.data();
    decode.arrivals = arrivals.data();
    decode.overlap = true;
    Check(LaunchFusedDecode(decode, stream), "fused decode");
  }

  const Heads heads;
  const int32_t layers;
  const int32_t sequences;
  const int32_t blocks;
  Buffer<__nv_bfloat16> kv, qkv, output;
  Buffer<float2> rotations;
  Buffer<int32_t> indices, indptr, last;
  Buffer<int64_t> slots;
  Buffer<int32_t> arrivals;
  Buffer<std::byte> partials;
  KvCacheShape cache;
  KvCacheMap map;
};

// One case of the check: its inputs on the host, and what must come out.
class Case {
 public:
  Case(const Heads& heads, std::vector<int32_t> lengths)
      : heads_(heads), step_(heads, kLayers, std::move(lengths), kBlocks), random_(3) {
    kv_.assign(static_cast<size_t>(Step::BlockElements(heads, kLayers) * kBlocks), Nan());
    qkv_.resize(static_cast<size_t>(heads.row() * step_.sequences()));
    for (auto& value : qkv_) value = Random();
    for (int64_t i = 0; i < int64_t{step_.sequences()} * heads.head_dim / 2; ++i) {
      const float angle = 3.0f * __bfloat162float(Random());
      rotations_.push_back({std::cos(angle), std::sin(angle)});
    }
    for (int32_t s = 0; s < step_.sequences(); ++s) {
      for (int32_t t = 0; t + 1 < step_.lengths[s]; ++t) {
        for (int plane = 0; plane < 2 * kLayers; ++plane) {
          auto* at = kv_.data() + Place(s, t) + plane * heads.plane();
          for (int64_t i = 0; i < heads.token(); ++i) at[i] = Random();
        }
      }
    }
  }

  // Whether all is right; `error` gets the largest relative error of a head's output.
  bool Run(double* error) {
    Device device(heads_, kLayers, step_, kBlocks);
    Upload(device.rotations, rotations_);
    bool ok = true;
    std::vector<__nv_bfloat16> first;
    // Fewer thread blocks cut the work at other places.
    for (const int32_t multiprocessors : {Multiprocessors(), 1, 3, 50, Multiprocessors()}) {
      Upload(device.kv, kv_);
      Upload(device.qkv, qkv_);
      device.output.Poison();
      device.Launch(kLayer, true, multiprocessors, nullptr);
      Check(cudaDeviceSynchronize(), "fused decode");
      const auto output = device.output.Read();
      ok &= Judge(output, error, "append");
      if (first.empty()) first = output;
      if (multiprocessors == Multiprocessors()) {
        ok &= Expect(Same(first, output), "a second run differs");
      }
    }
    ok &= CheckCache(device.kv.Read());
    // Again, with queries that are rotated already and the newest token in the cache.
    Upload(device.qkv, RotatedQueries());
    device.output.Poison();
    device.Launch(kLayer, false, Multiprocessors(), nullptr);
    Check(cudaDeviceSynchronize(), "fused decode");
    ok &= Judge(device.output.Read(), error, "appended before");
    for (const int32_t arrivals : device.arrivals.Read()) ok &= arrivals == 0;
    return Expect(ok, "case");
  }

 private:
  static constexpr int32_t kLayers = 2;
  static constexpr int32_t kLayer = 1;
  static constexpr int32_t kBlocks = 400;

  static __nv_bfloat16 Nan() { return __float2bfloat16(std::nanf("")); }
  __nv_bfloat16 Random() {
    return __float2bfloat16(static_cast<float>(random_() % 2001) * 1e-3f - 1.0f);
  }
  static bool Same(const std::vector<__nv_bfloat16>& a, const std::vector<__nv_bfloat16>& b) {
    return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * 2) == 0;
  }

  bool Expect(bool ok, const char* what) const {
    if (!ok) {
      std::printf("FAILED: %s: %d heads, %d KV heads of %d, %d sequences\n", what, heads_.heads,
                  heads_.kv_heads, heads_.head_dim, step_.sequences());
    }
    return ok;
  }

  int64_t Place(int32_t s, int32_t t) const {
    return step_.indices[step_.indptr[s] + t / kBlockTokens] *
               Step::BlockElements(heads_, kLayers) +
           t % kBlockTokens * heads_.token();
  }

  // The vector of head `head` (of queries, then keys, then values) of a row; rotated if asked.
  std::vector<float> Vector(int32_t s, int32_t head, bool rotated) const {
    const int32_t dim = heads_.head_dim;
    const auto* from = qkv_.data() + s * heads_.row() + int64_t{head} * dim;
    std::vector<float> v(static_cast<size_t>(dim));
    for (int32_t i = 0; i < dim; ++i) v[i] = __bfloat162float(from[i]);
    for (int32_t i = 0; rotated && i < dim / 2; ++i) {
      const float2 r = rotations_[int64_t{s} * dim / 2 + i];
      const float low = v[i], high = v[i + dim / 2];
      v[i] = Rounded(low * r.x - high * r.y);
      v[i + dim / 2] = Rounded(high * r.x + low * r.y);
    }
    return v;
  }

  std::vector<__nv_bfloat16> RotatedQueries() const {
    std::vector<__nv_bfloat16> rows = qkv_;
    for (int32_t s = 0; s < step_.sequences(); ++s) {
      for (int32_t head = 0; head < heads_.heads; ++head) {
        const auto v = Vector(s, head, true);
        auto* to = rows.data() + s * heads_.row() + int64_t{head} * heads_.head_dim;
        for (size_t i = 0; i < v.size(); ++i) to[i] = __float2bfloat16(v[i]);
      }
    }
    return rows;
  }

  // A token's key (or value) of one head.
  std::vector<float> Cached(int32_t s, int32_t t, int32_t kv_head, bool value) const {
    if (t + 1 == step_.lengths[s]) {
      return Vector(s, heads_.heads + (value ? heads_.kv_heads : 0) + kv_head, !value);
    }
    const auto* at = kv_.data() + Place(s, t) + (2 * kLayer + (value ? 1 : 0)) * heads_.plane() +
                     int64_t{kv_head} * heads_.head_dim;
    std::vector<float> v(static_cast<size_t>(heads_.head_dim));
    for (size_t i = 0; i < v.size(); ++i) v[i] = __bfloat162float(at[i]);
    return v;
  }

  std::vector<double> Reference(int32_t s, int32_t head) const {
    const auto query = Vector(s, head, true);
    const int32_t kv_head = head / heads_.group();
    std::vector<double> out(query.size());
    double sum = 0;
    for (int32_t t = 0; t < step_.lengths[s]; ++t) {
      const auto key = Cached(s, t, kv_head, false);
      double score = 0;
      for (size_t i = 0; i < key.size(); ++i) score += double{query[i]} * key[i];
      const double weight = std::exp(score / std::sqrt(double{1} * heads_.head_dim));
      const auto value = Cached(s, t, kv_head, true);
      for (size_t i = 0; i < value.size(); ++i) out[i] += weight * value[i];
      sum += weight;
    }
    for (double& v : out) v /= sum;
    return out;
  }

  bool Judge(const std::vector<__nv_bfloat16>& output, double* largest, const char* what) {
    if (references_.empty()) {
      for (int32_t s = 0; s < step_.sequences(); ++s) {
        for (int32_t h = 0; h < heads_.heads; ++h) references_.push_back(Reference(s, h));
      }
    }
    bool ok = true;
    for (size_t row = 0; row < references_.size(); ++row) {
      double difference = 0, norm = 0;
      for (size_t i = 0; i < references_[row].size(); ++i) {
        const double expected = references_[row][i];
        const double got = __bfloat162float(output[row * references_[row].size() + i]);
        difference += (got - expected) * (got - expected);
        norm += expected * expected;
      }
      const double error = std::sqrt(difference / norm);
      *largest = std::isnan(error) ? INFINITY : std::max(*largest, error);
      if (error < 1e-2) continue;
      if (ok) {
        std::printf("%s: sequence %zu of %d tokens, head %zu: error %g\n", what, row / heads_.heads,
                    step_.lengths[row / heads_.heads], row % heads_.heads, error);
      }
      ok = false;
    }
    return Expect(ok, what);
  }

  // The newest tokens have been added, and nothing else has changed.
  bool CheckCache(const std::vector<__nv_bfloat16>& cache) {
    std::vector<__nv_bfloat16> expected = kv_;
    bool near = true;
    for (int32_t s = 0; s < step_.sequences(); ++s) {
      for (const bool value : {false, true}) {
        for (int32_t h = 0; h < heads_.kv_heads; ++h) {
          const auto v = Cached(s, step_.lengths[s] - 1, h, value);
          const int64_t to = Place(s, step_.lengths[s] - 1) +
                             (2 * kLayer + (value ? 1 : 0)) * heads_.plane() +
                             int64_t{h} * heads_.head_dim;
          for (size_t i = 0; i < v.size(); ++i) {
            const float got = __bfloat162float(cache[to + i]);
            near &= std::abs(got - v[i]) <= 0.01f * std::abs(v[i]) + 1e-6f;
            expected[to + i] = cache[to + i];
          }
        }
      }
    }
    return Expect(near, "the newest token in the cache") &&
           Expect(Same(expected, cache), "the rest of the cache");
  }

  const Heads heads_;
  const Step step_;
  std::mt19937 random_;
  std::vector<__nv_bfloat16> kv_, qkv_;
  std::vector<float2> rotations_;
  std::vector<std::vector<double>> references_;
};

bool CheckAll(double* error) {
  std::vector<int32_t> many, few = {1, 2, 15, 16, 17, 31, 32, 33, 40, 48, 49, 64, 100};
  for (int32_t i = 0; i < 90; ++i) many.push_back(1 + i * 37 % 60);
  bool ok = true;
  for (const Heads& heads : {Heads{32, 8, 128}, Heads{8, 8, 128}, Heads{16, 2, 128},
                             Heads{14, 2, 64}, Heads{9, 3, 64}, Heads{6, 1, 64}}) {
    for (const auto& lengths : {few, many, std::vector<int32_t>{1}, std::vector<int32_t>{700, 3}}) {
      ok &= Case(heads, lengths).Run(error);
    }
  }
  return ok;
}

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
  const bool passed = CheckAll(&error);
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
