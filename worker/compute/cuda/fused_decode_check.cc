// The fused decode attention against fp64.
#include <cmath>
#include <cstdio>
#include <cstring>
#include <utility>
#include <vector>

#include "worker/compute/cuda/fused_decode_case.h"

namespace palimpsest::cuda {
namespace {

using bench::Check;

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

}  // namespace

bool CheckFusedDecode(double* error) {
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

}  // namespace palimpsest::cuda
