#include "worker/compute/cpu/thread_team.h"

#include <immintrin.h>

#include <algorithm>
#include <cassert>
#include <utility>

namespace palimpsest {
namespace {

// About 10 us; a longer wait belongs to the kernel, as other workers share the cores.
constexpr int kSpins = 512;

constexpr uint32_t kClosed = uint32_t{1} << 31;

}  // namespace

ThreadTeam::ThreadTeam(int threads, std::function<void(Member&)> body)
    : body_(std::move(body)), state_(kClosed) {
  assert(threads >= 1 && threads < 1 << 16);
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
  uint32_t seen = 0;
  for (;;) {
    run_.wait(seen, std::memory_order_acquire);
    seen = run_.load(std::memory_order_acquire);
    if (stop_.load(std::memory_order_relaxed)) return;
    if (!Enter()) continue;
    Member member(*this, thread, first_phase_);
    body_(member);
    Leave();
  }
}

bool ThreadTeam::Enter() {
  uint32_t state = state_.load(std::memory_order_acquire);
  while ((state & kClosed) == 0) {
    if (state_.compare_exchange_weak(state, state + 1, std::memory_order_acq_rel)) return true;
  }
  return false;
}

void ThreadTeam::Leave() {
  state_.fetch_or(kClosed, std::memory_order_relaxed);
  if (state_.fetch_sub(1, std::memory_order_acq_rel) == (kClosed | 1)) state_.notify_all();
}

void ThreadTeam::Start() {
  assert(state_.load() == kClosed);
  first_phase_ = completed_.load(std::memory_order_relaxed);
  state_.store(0, std::memory_order_release);
  run_.fetch_add(1, std::memory_order_release);
  run_.notify_all();
}

void ThreadTeam::Join() {
  for (;;) {
    const uint32_t state = state_.load(std::memory_order_acquire);
    if (state == kClosed) return;
    state_.wait(state, std::memory_order_acquire);
  }
}

ThreadTeam::Part ThreadTeam::Claim(uint32_t phase, int64_t total, int64_t grain) {
  uint64_t claim = claim_.load(std::memory_order_acquire);
  for (;;) {
    const auto first = static_cast<int64_t>(claim & 0xffffffff);
    if (claim >> 32 != phase || first >= total) return {};
    // Parts shrink as the end comes near.
    const int64_t fair = (total - first) / (2 * size());
    const int64_t count = std::min(total - first, std::max(grain, fair));
    if (claim_.compare_exchange_weak(claim, claim + static_cast<uint64_t>(count),
                                     std::memory_order_acq_rel, std::memory_order_acquire)) {
      return {first, first + count};
    }
  }
}

void ThreadTeam::AwaitPhase(uint32_t phase) {
  const auto over = [&](uint32_t completed) { return static_cast<int32_t>(completed - phase) > 0; };
  for (int i = 0; i < kSpins; ++i) {
    if (over(completed_.load(std::memory_order_acquire))) return;
    _mm_pause();
  }
  for (;;) {
    const uint32_t completed = completed_.load(std::memory_order_acquire);
    if (over(completed)) return;
    completed_.wait(completed, std::memory_order_acquire);
  }
}

void ThreadTeam::Member::ForEach(int64_t total, int64_t grain,
                                 absl::FunctionRef<void(int64_t, int64_t)> work,
                                 absl::FunctionRef<void()> finish) {
  if (total == 0) return;
  const uint32_t phase = phase_++;
  for (;;) {
    const Part part = team_.Claim(phase, total, grain);
    if (part.first == part.last) break;
    work(part.first, part.last);
    const int64_t count = part.last - part.first;
    if (team_.done_.fetch_add(count, std::memory_order_acq_rel) + count == total) {
      finish();
      team_.done_.store(0, std::memory_order_relaxed);
      team_.claim_.store(uint64_t{phase + 1} << 32, std::memory_order_release);
      team_.completed_.store(phase + 1, std::memory_order_release);
      team_.completed_.notify_all();
      return;
    }
  }
  team_.AwaitPhase(phase);
}

void ThreadTeam::Member::ForEach(int64_t total, int64_t grain,
                                 absl::FunctionRef<void(int64_t, int64_t)> work) {
  ForEach(total, grain, work, [] {});
}

}  // namespace palimpsest
