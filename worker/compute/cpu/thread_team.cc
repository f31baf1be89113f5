#include "worker/compute/cpu/thread_team.h"

#include <immintrin.h>

#include <algorithm>
#include <cassert>
#include <utility>

namespace palimpsest {
namespace {

// About 10 us; a longer wait belongs to the kernel, as other workers share the cores.
constexpr int kSpins = 512;

}  // namespace

ThreadTeam::ThreadTeam(int threads, std::function<void(int)> body) : body_(std::move(body)) {
  assert(threads >= 1);
  threads_.reserve(threads);
  for (int i = 0; i < threads; ++i) threads_.emplace_back([this, i] { Loop(i); });
}

ThreadTeam::~ThreadTeam() {
  Join();
  stop_.store(true, std::memory_order_relaxed);
  run_.fetch_add(1, std::memory_order_release);
  run_.notify_all();
  for (std::thread& thread : threads_) thread.join();
}

void ThreadTeam::Loop(int thread) {
  for (uint32_t seen = 0;; ++seen) {
    run_.wait(seen, std::memory_order_acquire);
    if (stop_.load(std::memory_order_relaxed)) return;
    body_(thread);
    if (running_.fetch_sub(1, std::memory_order_acq_rel) == 1) running_.notify_all();
  }
}

void ThreadTeam::Start() {
  assert(running_.load() == 0);
  claimed_.store(0, std::memory_order_relaxed);
  running_.store(static_cast<uint32_t>(size()), std::memory_order_relaxed);
  run_.fetch_add(1, std::memory_order_release);
  run_.notify_all();
}

void ThreadTeam::Join() {
  for (;;) {
    const uint32_t running = running_.load(std::memory_order_acquire);
    if (running == 0) return;
    running_.wait(running, std::memory_order_acquire);
  }
}

void ThreadTeam::Barrier() {
  const uint32_t generation = generation_.load(std::memory_order_relaxed);
  if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == static_cast<uint32_t>(size())) {
    arrived_.store(0, std::memory_order_relaxed);
    claimed_.store(0, std::memory_order_relaxed);
    generation_.store(generation + 1, std::memory_order_release);
    generation_.notify_all();
    return;
  }
  for (int i = 0; i < kSpins; ++i) {
    if (generation_.load(std::memory_order_acquire) != generation) return;
    _mm_pause();
  }
  generation_.wait(generation, std::memory_order_acquire);
}

ThreadTeam::Range ThreadTeam::Claim(int64_t total, int64_t grain) {
  int64_t first = claimed_.load(std::memory_order_relaxed);
  for (;;) {
    if (first >= total) return {};
    const int64_t fair = (total - first) / (2 * size());
    const int64_t share = std::max(grain, fair / grain * grain);
    const int64_t last = std::min(total, first + share);
    if (claimed_.compare_exchange_weak(first, last, std::memory_order_relaxed)) {
      return {first, last};
    }
  }
}

}  // namespace palimpsest
