// The fuzzer's walks, and that they reach what they are meant to test.
#include "gtest/gtest.h"
#include "worker/core/scheduler_fuzzer.h"

namespace palimpsest {
namespace {

TEST(SchedulerFuzz, MemoryThatMovesChangesNoToken) {
  int64_t preemptions = 0, cached = 0, moves = 0, finished = 0;
  int64_t continued = 0, discarded = 0, preempted_in_flight = 0;
  int64_t swapped = 0, returned = 0, joined = 0, failed = 0;
  int64_t stored = 0, loaded = 0, failed_loads = 0, awaited = 0, recomputed = 0, lies = 0;
  int64_t windows_stored = 0, windows_loaded = 0, windows_awaited = 0;
  int64_t late_answers = 0, late_loads = 0, retried = 0, lost = 0;
  for (uint64_t seed = 0; seed < 500; ++seed) {
    SCOPED_TRACE(seed);
    SchedulerFuzzer fuzzer(seed);
    fuzzer.Run();
    if (HasFatalFailure() || HasNonfatalFailure()) return;
    preemptions += fuzzer.counters().preemptions;
    cached += fuzzer.counters().cached_tokens;
    discarded += fuzzer.counters().discarded_tokens;
    moves += fuzzer.moves();
    finished += fuzzer.finished();
    continued += fuzzer.continued_chunks();
    preempted_in_flight += fuzzer.preempted_in_flight();
    swapped += fuzzer.counters().swapped_preemptions;
    returned += fuzzer.counters().blocks_swapped_in;
    failed += fuzzer.counters().failed_transfers;
    joined += fuzzer.joined_steps();
    stored += fuzzer.offload_counters().stored;
    loaded += fuzzer.counters().blocks_loaded;
    failed_loads += fuzzer.counters().failed_loads;
    awaited += fuzzer.counters().promotions_awaited;
    recomputed += fuzzer.counters().blocks_recomputed;
    lies += fuzzer.lies();
    if (fuzzer.windowed()) {
      windows_stored += fuzzer.offload_counters().stored;
      windows_loaded += fuzzer.counters().blocks_loaded;
      windows_awaited += fuzzer.counters().promotions_awaited;
    }
    late_answers += fuzzer.counters().late_answers;
    late_loads += fuzzer.counters().late_loads;
    retried += fuzzer.offload_counters().retried;
    lost += fuzzer.offload_counters().lost;
  }
  // The schedules must have exercised what they are for.
  EXPECT_GT(preemptions, 800);
  EXPECT_GT(cached, 10000);
  EXPECT_GT(moves, 800);
  EXPECT_GT(finished, 5000);
  EXPECT_GT(continued, 8000);
  EXPECT_GT(discarded, 300);
  EXPECT_GT(preempted_in_flight, 300);
  EXPECT_GT(swapped, 1500);
  EXPECT_GT(returned, 6000);
  EXPECT_GT(joined, 700);
  EXPECT_GT(failed, 120);
  EXPECT_GT(stored, 3000);
  EXPECT_GT(loaded, 700);
  EXPECT_GT(failed_loads, 50);
  EXPECT_GT(awaited, 50);
  EXPECT_GT(recomputed, 50);
  EXPECT_GT(lies, 50);
  EXPECT_GT(windows_stored, 3000);
  EXPECT_GT(windows_loaded, 200);
  EXPECT_GT(windows_awaited, 50);
  EXPECT_GT(late_answers, 200);
  EXPECT_GT(late_loads, 10);
  EXPECT_GT(retried, 10);
  EXPECT_GT(lost, 200);
}

}  // namespace
}  // namespace palimpsest
