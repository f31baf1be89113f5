#include "worker/blocks/grouped_block_store.h"

#include <algorithm>
#include <utility>
#include <variant>

#include "worker/blocks/common_lower.h"
#include "worker/core/check.h"

namespace palimpsest {
namespace {

using Result = ReservedBlock::Result;

// A block is as badly off as its worst part.
int BadnessOf(Result result) {
  switch (result) {
    case Result::kPresent:
      return 0;
    case Result::kReserved:
      return 1;
    case Result::kNoRoom:
      return 2;
    case Result::kRefused:
      break;
  }
  return 3;
}

template <typename Answer>
bool Complete(const std::vector<std::optional<Answer>>& answers) {
  return std::all_of(answers.begin(), answers.end(),
                     [](const auto& answer) { return answer.has_value(); });
}

std::vector<const AcquireAnswer*> Answers(
    const std::vector<std::optional<AcquireAnswer>>& answers) {
  std::vector<const AcquireAnswer*> all;
  for (const auto& answer : answers) all.push_back(&*answer);
  return all;
}

template <typename Answer>
absl::Status FirstError(const std::vector<std::optional<Answer>>& answers) {
  absl::Status status;
  for (const auto& answer : answers) status.Update(answer->status);
  return status;
}

}  // namespace

GroupedBlockStore::GroupedBlockStore(const Options& options, HeadParts parts, KvStore* inner,
                                     ConversationHints* hints, TierOne tier_one)
    : options_(options),
      parts_(std::move(parts)),
      inner_(inner),
      hints_(hints),
      tier_one_(std::move(tier_one)),
      staging_(std::make_unique_for_overwrite<std::byte[]>(
          static_cast<size_t>((parts_.block_bytes() * options.staging_blocks).count()))) {
  PALIMPSEST_CHECK(options.staging_blocks > 0);
  for (int32_t slot = options.staging_blocks; slot > 0; --slot) {
    free_slots_.push_back(static_cast<size_t>(slot - 1));
  }
}

GroupedBlockStore::~GroupedBlockStore() { Stop(); }

uint64_t GroupedBlockStore::RequestOf(uint64_t request, size_t group) const {
  return request == 0 ? 0 : request * groups() + group;
}

BlockChain GroupedBlockStore::ChainOf(const BlockChain& chain, int32_t group) const {
  BlockChain part = {
      .parent = HeadParts::KeyOf(chain.parent, group), .keys = {}, .tokens = chain.tokens};
  for (const BlockKey& key : chain.keys) part.keys.push_back(HeadParts::KeyOf(key, group));
  return part;
}

void GroupedBlockStore::Reserve(StoreCallId call, uint64_t request, BlockChain chain) {
  if (tier_one_.parts != nullptr) {
    tier_one_.parts->Extend(request, chain, tier_one_.clock->Now());
  }
  const uint64_t number = next_call_++;
  for (size_t group = 0; group < groups(); ++group) {
    const StoreCallId inner(next_inner_call_++);
    inner_calls_.emplace(inner, Inner{number, group});
    inner_->Reserve(inner, RequestOf(request, group), ChainOf(chain, static_cast<int32_t>(group)));
  }
  ReserveCall waiting = {.call = call, .keys = std::move(chain.keys), .answers = {}};
  waiting.answers.resize(groups());
  reserves_.emplace(number, std::move(waiting));
}

void GroupedBlockStore::OnInner(ReserveAnswer answer) {
  const auto inner = inner_calls_.find(answer.call);
  PALIMPSEST_CHECK(inner != inner_calls_.end());
  const auto call = reserves_.find(inner->second.number);
  call->second.answers[inner->second.group] = std::move(answer);
  inner_calls_.erase(inner);
  if (!Complete(call->second.answers)) return;
  FinishReserve(std::move(call->second));
  reserves_.erase(call);
}

void GroupedBlockStore::OnInner(StoreLost event) {
  if (tier_one_.parts != nullptr) tier_one_.parts->ForgetAll();
  events_.emplace_back(event);
}

ReservedBlock GroupedBlockStore::ReserveOne(const ReserveCall& call, size_t index) {
  Staged block = {.slot = 0, .key = call.keys[index], .parts = {}};
  Result worst = Result::kPresent;
  for (size_t group = 0; group < groups(); ++group) {
    const std::vector<ReservedBlock>& parts = call.answers[group]->blocks;
    const Result result = index < parts.size() ? parts[index].result : Result::kRefused;
    worst = std::max(worst, result, [](Result a, Result b) { return BadnessOf(a) < BadnessOf(b); });
    if (result != Result::kReserved) continue;
    block.parts.push_back({.group = static_cast<int32_t>(group), .place = parts[index].place});
  }
  if (worst == Result::kPresent) return {worst, {}};
  std::optional<size_t> slot;
  if (worst == Result::kReserved) {
    slot = TakeSlot();
    // One comes free when a copy ends.
    if (!slot.has_value()) worst = Result::kNoRoom;
  }
  if (!slot.has_value()) {
    AbortParts({block});
    return {worst, {}};
  }
  block.slot = *slot;
  const StorePlace place = {.memory = At(*slot), .id = next_place_++};
  staged_.emplace(place.id, std::move(block));
  return {Result::kReserved, place};
}

void GroupedBlockStore::FinishReserve(ReserveCall call) {
  ReserveAnswer answer = {.call = call.call, .status = FirstError(call.answers), .blocks = {}};
  bool refused = false;
  for (size_t i = 0; i < call.keys.size(); ++i) {
    if (refused) {
      // Parts that other groups have got are given back.
      for (auto& group : call.answers) {
        if (i >= group->blocks.size()) continue;
        if (group->blocks[i].result != Result::kReserved) continue;
        const auto number = static_cast<int32_t>(&group - call.answers.data());
        AbortParts({Staged{0, call.keys[i], {Part{number, group->blocks[i].place, 0}}}});
      }
      continue;
    }
    answer.blocks.push_back(ReserveOne(call, i));
    refused = BadnessOf(answer.blocks.back().result) > BadnessOf(Result::kReserved);
  }
  if (!answer.status.ok()) answer.blocks.clear();
  events_.emplace_back(std::move(answer));
}

void GroupedBlockStore::AbortParts(const std::vector<Staged>& blocks) {
  std::vector<WrittenBlock> parts;
  for (const Staged& block : blocks) {
    for (const Part& part : block.parts) {
      parts.push_back({.key = HeadParts::KeyOf(block.key, part.group), .place = part.place});
    }
  }
  if (!parts.empty()) inner_->Abort(std::move(parts));
}

void GroupedBlockStore::Commit(std::vector<WrittenBlock> blocks) {
  Job job;
  for (const WrittenBlock& block : blocks) {
    auto staged = staged_.extract(block.place.id);
    PALIMPSEST_CHECK(!staged.empty());
    job.blocks.push_back(std::move(staged.mapped()));
  }
  Push(std::move(job));
}

void GroupedBlockStore::Abort(std::vector<WrittenBlock> blocks) {
  std::vector<Staged> aborted;
  for (const WrittenBlock& block : blocks) {
    auto staged = staged_.extract(block.place.id);
    PALIMPSEST_CHECK(!staged.empty());
    free_slots_.push_back(staged.mapped().slot);
    aborted.push_back(std::move(staged.mapped()));
  }
  AbortParts(aborted);
}

void GroupedBlockStore::Acquire(StoreCallId call, StoreQuery query) {
  PALIMPSEST_CHECK(query.window == 0);
  if (tier_one_.parts != nullptr) tier_one_.parts->Begin(query.request, query.chain);
  const uint64_t number = next_call_++;
  for (size_t group = 0; group < groups(); ++group) {
    StoreQuery part = query;
    part.chain = ChainOf(query.chain, static_cast<int32_t>(group));
    part.request = RequestOf(query.request, group);
    part.conversation = RequestOf(query.conversation, group);
    const StoreCallId inner(next_inner_call_++);
    inner_calls_.emplace(inner, Inner{number, group});
    inner_->Acquire(inner, std::move(part));
  }
  AcquireCall waiting = {.call = call,
                         .keys = {query.chain.keys.begin() + query.held, query.chain.keys.end()},
                         .held = query.held,
                         .answers = {}};
  waiting.answers.resize(groups());
  acquires_.emplace(number, std::move(waiting));
}

void GroupedBlockStore::OnInner(AcquireAnswer answer) {
  const auto inner = inner_calls_.find(answer.call);
  PALIMPSEST_CHECK(inner != inner_calls_.end());
  const auto call = acquires_.find(inner->second.number);
  call->second.answers[inner->second.group] = std::move(answer);
  inner_calls_.erase(inner);
  if (!Complete(call->second.answers)) return;
  FinishAcquire(std::move(call->second));
  acquires_.erase(call);
}

void GroupedBlockStore::NoteTierOne(const AcquireCall& call) {
  if (tier_one_.parts == nullptr) return;
  for (int32_t group = 0; group < parts_.count(); ++group) {
    const AcquireAnswer& answer = *call.answers[static_cast<size_t>(group)];
    const size_t there = std::min(answer.blocks.size(), call.keys.size());
    for (size_t i = 0; i < there; ++i) tier_one_.parts->Came(call.keys[i], group);
    // Of those behind it nothing is known.
    if (answer.status.ok() && there < call.keys.size()) {
      tier_one_.parts->Left(call.keys[there], group);
    }
  }
}

void GroupedBlockStore::FinishAcquire(AcquireCall call) {
  NoteTierOne(call);
  size_t common = call.keys.size();
  for (const auto& answer : call.answers) common = std::min(common, answer->blocks.size());
  Job job;
  job.load.emplace();
  job.load->call = call.call;
  job.load->status = FirstError(call.answers);
  job.load->first = call.held;
  job.load->lower = LowerOfAll(Answers(call.answers), common);
  job.load->kept = call.held;
  for (const auto& answer : call.answers) {
    job.load->kept = std::min(job.load->kept, answer->kept);
  }
  for (size_t i = 0; i < common; ++i) {
    const std::optional<size_t> slot = TakeSlot();
    if (!slot.has_value()) break;
    Staged block = {.slot = *slot, .key = call.keys[i], .parts = {}};
    for (size_t group = 0; group < groups(); ++group) {
      const PinnedBlock& part = call.answers[group]->blocks[i];
      block.parts.push_back({static_cast<int32_t>(group), part.place, part.checksum});
    }
    job.blocks.push_back(std::move(block));
  }
  // With no place to put them together, what lies behind is not known either.
  if (job.blocks.size() < common) job.load->lower.clear();
  std::vector<StorePlace> unused;
  for (const auto& answer : call.answers) {
    for (size_t i = job.blocks.size(); i < answer->blocks.size(); ++i) {
      unused.push_back(answer->blocks[i].place);
    }
  }
  if (!unused.empty()) inner_->Release(std::move(unused));
  if (job.blocks.empty()) {
    events_.emplace_back(*std::move(job.load));
    return;
  }
  Push(std::move(job));
}

void GroupedBlockStore::Release(std::vector<StorePlace> places) {
  for (const StorePlace& place : places) {
    const auto staged = staged_.find(place.id);
    PALIMPSEST_CHECK(staged != staged_.end());
    free_slots_.push_back(staged->second.slot);
    staged_.erase(staged);
  }
}

void GroupedBlockStore::EndRequest(const StoreRequestEnd& end) {
  Job job;
  job.end = end;
  Push(std::move(job));
}

void GroupedBlockStore::SetRecompute(double first_seconds, double per_position_seconds) {
  const auto parts = static_cast<double>(groups());
  inner_->SetRecompute(first_seconds / parts, per_position_seconds / parts);
}

std::optional<size_t> GroupedBlockStore::TakeSlot() {
  if (free_slots_.empty()) return std::nullopt;
  const size_t slot = free_slots_.back();
  free_slots_.pop_back();
  return slot;
}

void GroupedBlockStore::FinishRequest(const StoreRequestEnd& ended) {
  for (size_t group = 0; group < groups(); ++group) {
    StoreRequestEnd end = ended;
    end.request = RequestOf(ended.request, group);
    end.conversation = RequestOf(ended.conversation, group);
    inner_->EndRequest(end);
  }
  if (tier_one_.parts == nullptr) return;
  tier_one_.parts->End(ended.request, tier_one_.clock->Now());
  for (const auto& demotion : tier_one_.parts->TakeDemotions(tier_one_.masses())) {
    tier_one_.demote(ChainOf(demotion.chain, demotion.group), demotion.first);
  }
}

void GroupedBlockStore::Finish(Job job) {
  if (job.end.has_value()) return FinishRequest(*job.end);
  if (!job.load.has_value()) {
    std::vector<WrittenBlock> parts;
    for (const Staged& block : job.blocks) {
      for (const Part& part : block.parts) {
        parts.push_back({HeadParts::KeyOf(block.key, part.group), part.place, part.checksum});
        if (tier_one_.parts != nullptr) tier_one_.parts->Came(block.key, part.group);
      }
      free_slots_.push_back(block.slot);
    }
    inner_->Commit(std::move(parts));
    return;
  }
  std::vector<StorePlace> taken;
  for (size_t i = 0; i < job.blocks.size(); ++i) {
    for (const Part& part : job.blocks[i].parts) taken.push_back(part.place);
    if (i >= job.load->blocks.size()) {
      free_slots_.push_back(job.blocks[i].slot);
      continue;
    }
    StorePlace& place = job.load->blocks[i].place;
    place.id = next_place_++;
    staged_.emplace(place.id, Staged{job.blocks[i].slot, job.blocks[i].key, {}});
  }
  if (job.load->blocks.size() < job.blocks.size()) job.load->lower.clear();
  inner_->Release(std::move(taken));
  events_.emplace_back(*std::move(job.load));
}

std::vector<StoreEvent> GroupedBlockStore::TakeEvents() {
  for (StoreEvent& event : inner_->TakeEvents()) {
    std::visit([this](auto& e) { OnInner(std::move(e)); }, event);
  }
  std::vector<Job> done;
  {
    MutexLock lock(&mu_);
    done.swap(done_);
  }
  for (Job& job : done) Finish(std::move(job));
  return std::exchange(events_, {});
}

void GroupedBlockStore::SetWakeup(std::function<void()> wakeup) {
  inner_->SetWakeup(wakeup);
  MutexLock lock(&mu_);
  wakeup_ = std::move(wakeup);
  while (waking_) changed_.Wait(&mu_);
}

void GroupedBlockStore::Hint(uint64_t conversation, const CacheAction& action,
                             std::function<void(absl::StatusOr<uint64_t>)> done) {
  if (hints_ == nullptr) return done(absl::UnavailableError("this store takes no hints"));
  struct Sum {
    Mutex mu;
    size_t waiting ABSL_GUARDED_BY(mu) = 0;
    absl::Status status ABSL_GUARDED_BY(mu);
    uint64_t blocks ABSL_GUARDED_BY(mu) = 0;
  };
  const auto sum = std::make_shared<Sum>();
  {
    MutexLock lock(&sum->mu);
    sum->waiting = groups();
  }
  const auto answered = [sum, done = std::move(done)](const absl::StatusOr<uint64_t>& blocks) {
    absl::StatusOr<uint64_t> all;
    {
      MutexLock lock(&sum->mu);
      sum->status.Update(blocks.status());
      sum->blocks = std::max(sum->blocks, blocks.value_or(0));
      if (--sum->waiting > 0) return;
      all = sum->blocks;
      if (!sum->status.ok()) all = sum->status;
    }
    done(std::move(all));
  };
  for (size_t group = 0; group < groups(); ++group) {
    hints_->Hint(RequestOf(conversation, group), action, answered);
  }
}

}  // namespace palimpsest
