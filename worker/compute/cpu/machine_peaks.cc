#include "worker/compute/cpu/machine_peaks.h"

#include <immintrin.h>

#include <chrono>
#include <cstdint>
#include <thread>
#include <vector>

namespace palimpsest {
namespace {

using Clock = std::chrono::steady_clock;

constexpr int kChains = 12;

// Keeps the compiler from dropping the computation of `value`.
template <typename T>
void Consume(const T& value) {
  asm volatile("" ::"m"(value) : "memory");
}

__attribute__((target("avx512f"))) int64_t RunFmaAvx512(int64_t rounds) {
  __m512 chain[kChains];
  for (int i = 0; i < kChains; ++i) chain[i] = _mm512_set1_ps(static_cast<float>(i));
  const __m512 a = _mm512_set1_ps(0.999f), b = _mm512_set1_ps(1e-3f);
  for (int64_t r = 0; r < rounds; ++r) {
#pragma GCC unroll 12
    for (int i = 0; i < kChains; ++i) chain[i] = _mm512_fmadd_ps(chain[i], a, b);
  }
  Consume(chain);
  return rounds * kChains * 32;
}

__attribute__((target("avx2,fma"))) int64_t RunFmaAvx2(int64_t rounds) {
  __m256 chain[kChains];
  for (int i = 0; i < kChains; ++i) chain[i] = _mm256_set1_ps(static_cast<float>(i));
  const __m256 a = _mm256_set1_ps(0.999f), b = _mm256_set1_ps(1e-3f);
  for (int64_t r = 0; r < rounds; ++r) {
#pragma GCC unroll 12
    for (int i = 0; i < kChains; ++i) chain[i] = _mm256_fmadd_ps(chain[i], a, b);
  }
  Consume(chain);
  return rounds * kChains * 16;
}

int64_t RunFma(int64_t rounds) {
  return __builtin_cpu_supports("avx512f") ? RunFmaAvx512(rounds) : RunFmaAvx2(rounds);
}

// Runs `work(thread)` on all threads and returns the seconds until the last is done.
template <typename F>
double Time(int threads, F work) {
  std::vector<std::thread> team;
  const Clock::time_point start = Clock::now();
  for (int i = 0; i < threads; ++i) team.emplace_back([&, i] { work(i); });
  for (std::thread& thread : team) thread.join();
  return std::chrono::duration<double>(Clock::now() - start).count();
}

}  // namespace

double MeasureFlops(int threads) {
  constexpr int64_t kRounds = 40'000'000;
  std::vector<int64_t> operations(threads);
  const double seconds = Time(threads, [&](int i) { operations[i] = RunFma(kRounds); });
  double total = 0;
  for (const int64_t n : operations) total += static_cast<double>(n);
  return total / seconds;
}

double MeasureReadBandwidth(int threads, absl::Span<const std::byte> memory) {
  const size_t share = memory.size() / threads / 64 * 64;
  const double seconds = Time(threads, [&](int i) {
    const auto* words = reinterpret_cast<const uint64_t*>(memory.data() + i * share);
    uint64_t sums[4] = {};
    for (size_t w = 0; w < share / 8; w += 8) {
      for (int j = 0; j < 4; ++j) sums[j] |= words[w + j] ^ words[w + 4 + j];
    }
    Consume(sums);
  });
  return static_cast<double>(share) * threads / seconds;
}

}  // namespace palimpsest
