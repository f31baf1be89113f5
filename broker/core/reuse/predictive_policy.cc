#include "broker/core/reuse/predictive_policy.h"

#include <algorithm>
#include <cassert>

namespace palimpsest::reuse {
namespace {

// Blocks of a path that has this much in common with an earlier one at least belong to its
// conversation.
bool IsMostOf(size_t known, uint32_t length) { return known * 2 >= length; }

uint64_t OriginClass(Origin origin, bool known) {
  return static_cast<uint64_t>(origin) * 2 + (known ? 1 : 0);
}

// AgeBinEnd of all bins that close.
const std::array<absl::Duration, kLastAgeBin>& BinEnds() {
  static const std::array<absl::Duration, kLastAgeBin> ends = [] {
    std::array<absl::Duration, kLastAgeBin> all;
    for (size_t bin = 0; bin < all.size(); ++bin) all[bin] = absl::Seconds(AgeBinEnd(bin));
    return all;
  }();
  return ends;
}

auto FindRun(auto& runs, uint32_t index) {
  const auto run = std::partition_point(runs.begin(), runs.end(),
                                        [index](const Run& r) { return r.end <= index; });
  assert(run != runs.end() && run->begin <= index);
  return run;
}

}  // namespace

PredictivePolicy::PredictivePolicy(const HazardModelOptions& options, size_t most_watched)
    : most_watched_(most_watched), model_(options) {
  assert(most_watched > 0);
}

PredictivePolicy::Block& PredictivePolicy::At(cache::BlockHandle handle) {
  if (handle.value() >= blocks_.size()) blocks_.resize(handle.value() + size_t{1});
  return blocks_[handle.value()];
}

void PredictivePolicy::OnRequest(const cache::RequestInfo& request, const cache::Access& access) {
  Advance(request.arrival);
  const auto [running, inserted] = running_.try_emplace(request.id);
  // kPlain: every block is announced as a request of its own.
  if (!inserted) Finish(running->second, {.id = request.id, .time = request.arrival});
  const SegmentId id = segments_.Allocate();
  running->second = id;
  const Arrival arrival = Classify(request, access);
  Segment& segment = segments_.At(id);
  segment.since = request.arrival;
  segment.conversation = request.conversation;
  segment.request = request.id;
  segment.running = true;
  segment.turns = arrival.turns;
  segment.length = segment.known = segment.blocks = static_cast<uint32_t>(access.path.size());
  segment.base.Set(Feature::kLength, CountClass(access.path.size()));
  segment.base.Set(Feature::kTurns, TurnsClass(arrival.turns));
  segment.base.Set(Feature::kNew, CountClass(access.path.size() - access.known));
  segment.base.Set(Feature::kOrigin, OriginClass(arrival.origin, false));
  Take(id, request, access, arrival);
  Cut(segment);
  if (segment.leaf != cache::kNoBlock) Enqueue(id);
  for (const SegmentId touched : touched_) {
    MarkLeftBehind(touched);
    FreeIfEmpty(touched);
  }
  RefreshSome();
}

PredictivePolicy::Arrival PredictivePolicy::Classify(const cache::RequestInfo& request,
                                                     const cache::Access& access) const {
  if (access.known == 0) return {};
  const Block& last = blocks_[access.path[access.known - 1].value()];
  const Segment& before = segments_.At(last.segment);
  const uint32_t rest = before.length - std::min(before.length, last.index + 1);
  const bool said = request.conversation.value() != 0;
  const bool continues = access.known > 1 && rest <= kContinuationSlack;
  Arrival arrival;
  if (said ? request.conversation == before.conversation : continues) {
    arrival.transition =
        before.ending == cache::Ending::kToolCall ? Transition::kToolReturn : Transition::kNextTurn;
  } else if (access.known > 1 && IsMostOf(access.known, before.length)) {
    arrival.transition = Transition::kBranch;
  }
  if (continues) {
    arrival.origin = Origin::kContinuation;
    arrival.turns = before.turns + 1;
  } else if (access.known > 1) {
    arrival.origin = Origin::kBranch;
    arrival.turns = IsMostOf(access.known, before.length) ? before.turns : 0;
  }
  return arrival;
}

void PredictivePolicy::Take(SegmentId id, const cache::RequestInfo& request,
                            const cache::Access& access, const Arrival& arrival) {
  touched_.clear();
  stretches_.clear();
  uint64_t gap = GapClass(std::nullopt);
  for (size_t i = 0; i < access.path.size(); ++i) {
    const cache::BlockHandle handle = access.path[i];
    Block& block = At(handle);
    const bool known = block.segment != kNoSegment;
    if (known) {
      if (touched_.empty() || touched_.back() != block.segment) {
        touched_.push_back(block.segment);
        const Segment& before = segments_.At(block.segment);
        gap = GapClass(request.arrival - before.since);
      }
      if (Leave(handle, arrival.transition)) segments_.At(id).leaf = handle;
    } else {
      gap = GapClass(std::nullopt);
    }
    block = {.segment = id,
             .index = static_cast<uint32_t>(i),
             .uses = block.uses + 1,
             .type = TypeOf(request, i, known, arrival, block.type)};
    ReuseClass features = segments_.At(id).base;
    features.Set(Feature::kUses, UsesClass(block.uses));
    features.Set(Feature::kOrigin, OriginClass(arrival.origin, known));
    features.Set(Feature::kGap, gap);
    features.Set(Feature::kType, static_cast<uint64_t>(block.type));
    if (stretches_.empty() || !(stretches_.back().features == features)) {
      stretches_.push_back({block.index, block.index, features});
    }
    stretches_.back().end = block.index + 1;
  }
}

// Without labels: what several conversations share is a system prompt, and what came after a tool
// call its result.
cache::BlockType PredictivePolicy::TypeOf(const cache::RequestInfo& request, size_t index,
                                          bool known, const Arrival& arrival,
                                          cache::BlockType before) const {
  if (index < request.types.size() && request.types[index] != cache::BlockType::kUnknown) {
    return request.types[index];
  }
  if (known) {
    return arrival.transition == Transition::kNewConversation ? cache::BlockType::kSystemPrompt
                                                              : before;
  }
  return arrival.transition == Transition::kToolReturn ? cache::BlockType::kToolContext
                                                       : cache::BlockType::kUserContext;
}

bool PredictivePolicy::Leave(cache::BlockHandle handle, Transition transition) {
  const Block& block = At(handle);
  Segment& segment = segments_.At(block.segment);
  const bool was_leaf = segment.leaf == handle;
  if (was_leaf) {
    queue_.Remove(block.segment);
    segment.leaf = cache::kNoBlock;
  }
  segment.taken = std::max(segment.taken, block.index + 1);
  --segment.blocks;
  if (!segment.running) {
    ++FindRun(segment.runs, block.index)->taken;
    if (!segment.transition.has_value()) segment.transition = transition;
  }
  return was_leaf;
}

void PredictivePolicy::MarkLeftBehind(SegmentId id) {
  Segment& segment = segments_.At(id);
  const uint64_t left_behind = LeftBehindClass(segment.taken, segment.length);
  const bool queued = queue_.Contains(id);
  if (queued) queue_.Remove(id);
  for (Run& run : segment.runs) {
    ReuseClass features = model_.ClassOf(run.now);
    if (segment.Left(run) == 0 || features[Feature::kLeftBehind] >= left_behind) continue;
    features.Set(Feature::kLeftBehind, left_behind);
    model_.Release(run.now);
    run.now = model_.Acquire(features);
  }
  if (queued) Enqueue(id);
}

void PredictivePolicy::Cut(Segment& segment) {
  std::vector<Run> runs;
  for (const Stretch& stretch : stretches_) {
    uint32_t begin = std::max(stretch.begin, segment.taken);
    const uint32_t stop = std::min(stretch.end, segment.known);
    while (begin < stop) {
      const uint32_t from_tail = segment.length - 1 - begin;
      const uint64_t tail = FromTailClass(from_tail);
      // The blocks from `begin` on are as far from the end as the class of `begin` says down to
      // the step below it.
      const uint32_t nearest = tail == 0 ? 0 : kFromTailSteps[tail - 1];
      const uint32_t end = std::min(stop, segment.length - nearest);
      ReuseClass features = stretch.features;
      features.Set(Feature::kFromTail, tail);
      const ClassId id = model_.Acquire(features);
      if (!runs.empty() && runs.back().now == id && runs.back().end == begin) {
        model_.Release(id);
        runs.back().end = end;
      } else {
        model_.Retain(id);
        runs.push_back({.begin = begin, .end = end, .now = id, .voter = id});
      }
      begin = end;
    }
  }
  DropRuns(segment);
  segment.runs.swap(runs);
}

void PredictivePolicy::DropRuns(Segment& segment) {
  for (const Run& run : segment.runs) {
    model_.Release(run.now);
    model_.Release(run.voter);
  }
  segment.runs.clear();
}

void PredictivePolicy::OnExtend(cache::RequestId request, cache::BlockHandle block) {
  const auto running = running_.find(request);
  assert(running != running_.end());
  const SegmentId id = running->second;
  if (At(block).segment != kNoSegment) {
    const SegmentId before = At(block).segment;
    // Segments lose blocks from the front alone.
    if (At(block).index != segments_.At(before).taken) return;
    Leave(block, Transition::kBranch);
    MarkLeftBehind(before);
    FreeIfEmpty(before);
  }
  Segment& segment = segments_.At(id);
  Block& state = At(block);
  state = {.segment = id,
           .index = segment.length,
           .uses = state.uses + 1,
           .type = cache::BlockType::kReasoning};
  ReuseClass features = segment.base;
  features.Set(Feature::kUses, UsesClass(state.uses));
  features.Set(Feature::kType, static_cast<uint64_t>(state.type));
  const ClassId added = model_.Acquire(features);
  ++segment.blocks;
  segment.known = ++segment.length;
  if (!segment.runs.empty() && segment.runs.back().now == added &&
      segment.runs.back().end == state.index) {
    model_.Release(added);
    segment.runs.back().end = segment.length;
  } else {
    model_.Retain(added);
    segment.runs.push_back(
        {.begin = state.index, .end = segment.length, .now = added, .voter = added});
  }
}

void PredictivePolicy::OnRequestEnd(const cache::RequestEnd& end) {
  const auto running = running_.find(end.id);
  assert(running != running_.end());
  const SegmentId id = running->second;
  running_.erase(running);
  Advance(end.time);
  Finish(id, end);
}

void PredictivePolicy::Finish(SegmentId id, const cache::RequestEnd& end) {
  Segment& segment = segments_.At(id);
  const auto describe = [&end](ReuseClass& features) {
    features.Set(Feature::kEnding, EndingClass(end.how, end.last_turn));
    features.Set(Feature::kOutput, OutputClass(end.output_tokens));
    features.Set(Feature::kExpected, ExpectedClass(end.expected_idle));
  };
  if (queue_.Contains(id)) queue_.Remove(id);
  stretches_.clear();
  for (const Run& run : segment.runs) {
    stretches_.push_back({run.begin, run.end, model_.ClassOf(run.now)});
    describe(stretches_.back().features);
  }
  Cut(segment);
  segment.ending = end.how;
  segment.running = false;
  segment.since = end.time;
  segment.watched = DrawsWatch();
  segments_.Push(id, 0);
  if (segment.leaf != cache::kNoBlock) Enqueue(id);
  FreeIfEmpty(id);
}

bool PredictivePolicy::DrawsWatch() {
  const uint64_t one_in = 1 + segments_.size() / most_watched_;
  // Evenly spread numbers that have nothing to do with the order of requests (Knuth, "The Art of
  // Computer Programming" 3, 6.4: Fibonacci hashing).
  constexpr uint64_t kGolden = 0x9e3779b97f4a7c15;
  return (++finished_ * kGolden >> 32) % one_in == 0;
}

void PredictivePolicy::OnEvictable(cache::BlockHandle block) {
  const SegmentId id = At(block).segment;
  Segment& segment = segments_.At(id);
  assert(segment.leaf == cache::kNoBlock);
  segment.leaf = block;
  Enqueue(id);
}

void PredictivePolicy::OnPinned(cache::BlockHandle block) {
  const SegmentId id = At(block).segment;
  assert(segments_.At(id).leaf == block);
  queue_.Remove(id);
  segments_.At(id).leaf = cache::kNoBlock;
}

void PredictivePolicy::OnEvict(cache::BlockHandle block) { OnPinned(block); }

void PredictivePolicy::OnForget(cache::BlockHandle block) {
  Block& state = At(block);
  const SegmentId id = state.segment;
  Segment& segment = segments_.At(id);
  segment.known = std::min(segment.known, state.index);
  --segment.blocks;
  state = {};
  FreeIfEmpty(id);
}

std::optional<cache::BlockHandle> PredictivePolicy::ChooseVictim(absl::Time now,
                                                                 cache::BlockHandle block,
                                                                 bool may_refuse) {
  Advance(now);
  if (queue_.empty()) return std::nullopt;
  if (may_refuse && block != cache::kNoBlock && At(block).segment != kNoSegment &&
      WorthOf(block) < queue_.TopWorth()) {
    return std::nullopt;
  }
  return segments_.At(queue_.Top()).leaf;
}

void PredictivePolicy::Advance(absl::Time now) {
  if (now <= advanced_) return;
  advanced_ = now;
  for (size_t bin = 0; bin < kLastAgeBin; ++bin) {
    const absl::Time before = now - BinEnds()[bin];
    while (true) {
      const SegmentId id = segments_.Oldest(bin);
      if (id == kNoSegment || segments_.At(id).since > before) break;
      CloseBin(id);
    }
  }
}

void PredictivePolicy::CloseBin(SegmentId id) {
  Segment& segment = segments_.At(id);
  if (segment.watched) Vote(segment);
  if (segment.blocks == 0) {
    --pending_;
    Free(id);
    return;
  }
  const bool queued = queue_.Contains(id);
  if (queued) queue_.Remove(id);
  segments_.Remove(id);
  segments_.Push(id, segment.bin + size_t{1});
  if (queued) Enqueue(id);
}

void PredictivePolicy::Vote(Segment& segment) {
  struct Blocks {
    uint32_t taken = 0, all = 0;
  };
  std::array<Blocks, kBlockTypes> by_type{};
  TransitionPairs& pairs = model_.pairs();
  pairs.ObserveBin(segment.ending, segment.bin, segment.transition);
  for (Run& run : segment.runs) {
    const uint32_t all = segment.Left(run) + run.taken;
    if (all > 0) {
      const float share = static_cast<float>(run.taken) / static_cast<float>(all);
      Blocks& blocks = by_type[model_.ClassOf(run.voter)[Feature::kType]];
      blocks.taken += run.taken;
      blocks.all += all;
      calibration_.Add(model_.Observe(run.voter, segment.bin, share), share);
      ++votes_;
    }
    run.taken = 0;
    if (run.voter == run.now) continue;
    model_.Retain(run.now);
    model_.Release(run.voter);
    run.voter = run.now;
  }
  if (!segment.transition.has_value()) return;
  for (size_t type = 0; type < kBlockTypes; ++type) {
    if (by_type[type].all == 0) continue;
    pairs.ObserveReuse(
        static_cast<cache::BlockType>(type), *segment.transition,
        static_cast<float>(by_type[type].taken) / static_cast<float>(by_type[type].all));
  }
  segment.transition.reset();
}

void PredictivePolicy::FreeIfEmpty(SegmentId id) {
  Segment& segment = segments_.At(id);
  if (segment.blocks > 0 || segment.running) return;
  const bool votes = segment.watched && std::any_of(segment.runs.begin(), segment.runs.end(),
                                                    [](const Run& run) { return run.taken > 0; });
  if (votes && segment.bin < kLastAgeBin && pending_ < kMostPending) {
    ++pending_;
    return;
  }
  if (votes) Vote(segment);
  Free(id);
}

void PredictivePolicy::Free(SegmentId id) {
  DropRuns(segments_.At(id));
  segments_.Remove(id);
  segments_.Free(id);
}

void PredictivePolicy::Enqueue(SegmentId id) {
  const Segment& segment = segments_.At(id);
  const ClassId reuse_class = ClassOf(segment, At(segment.leaf).index);
  EnsureWorth(reuse_class);
  queue_.Insert(id, reuse_class, segment.bin);
}

ClassId PredictivePolicy::ClassOf(const Segment& segment, uint32_t index) const {
  return FindRun(segment.runs, index)->now;
}

void PredictivePolicy::EnsureWorth(ClassId id) {
  if (id.value() >= computed_.size()) computed_.resize(id.value() + size_t{1});
  const Computed& computed = computed_[id.value()];
  if (computed.serial != model_.SerialOf(id) || votes_ - computed.votes > kStaleVotes) {
    ComputeWorth(id);
  }
}

void PredictivePolicy::ComputeWorth(ClassId id) {
  const Hazards hazards = model_.HazardsOf(id);
  queue_.SetWorth(id, HitDensity(hazards));
  computed_[id.value()] = {
      .serial = model_.SerialOf(id), .votes = votes_, .reuse = ReuseAtAll(hazards)};
}

void PredictivePolicy::RefreshSome() {
  const std::vector<ClassId>& live = queue_.live();
  const size_t due = (votes_ - refreshed_) / kVotesPerRefresh;
  refreshed_ += due * kVotesPerRefresh;
  for (size_t i = std::min(due, live.size()); i > 0; --i) {
    ComputeWorth(live[next_refresh_++ % live.size()]);
  }
}

float PredictivePolicy::WorthOf(cache::BlockHandle block) {
  const Block& state = At(block);
  assert(state.segment != kNoSegment);
  const Segment& segment = segments_.At(state.segment);
  const ClassId reuse_class = ClassOf(segment, state.index);
  EnsureWorth(reuse_class);
  return queue_.WorthOf(reuse_class, segment.bin);
}

std::optional<cache::Outlook> PredictivePolicy::OutlookOf(absl::Time now,
                                                          cache::BlockHandle block) {
  Advance(now);
  const double worth = WorthOf(block);
  const Segment& segment = segments_.At(At(block).segment);
  const ClassId id = ClassOf(segment, At(block).index);
  return cache::Outlook{.reuse = computed_[id.value()].reuse[segment.bin],
                        .hits_per_second = worth};
}

bool PredictivePolicy::IsEvictable(cache::BlockHandle block) const {
  if (block.value() >= blocks_.size()) return false;
  const SegmentId id = blocks_[block.value()].segment;
  return id != kNoSegment && segments_.At(id).leaf == block;
}

}  // namespace palimpsest::reuse
