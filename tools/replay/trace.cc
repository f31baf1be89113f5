#include "tools/replay/trace.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "absl/strings/str_cat.h"

namespace palimpsest::replay {

absl::Status TraceBuilder::Add(const TraceRequest& request, uint32_t root,
                               absl::Span<const uint64_t> names) {
  if (trace_.requests_.size() == kMostRequests) {
    return absl::OutOfRangeError(absl::StrCat("more than ", kMostRequests, " requests"));
  }
  if (trace_.blocks_.size() + names.size() > kMostAccesses) {
    return absl::OutOfRangeError(
        absl::StrCat("more than ", kMostAccesses, " blocks in all prompts together"));
  }
  const int64_t fills = request.input_tokens / trace_.block_tokens_ +
                        (request.input_tokens % trace_.block_tokens_ > 0 ? 1 : 0);
  if (static_cast<int64_t>(names.size()) > fills) {
    return absl::InvalidArgumentError(absl::StrCat("expected at most ", fills, " blocks of ",
                                                   trace_.block_tokens_, " tokens for ",
                                                   request.input_tokens, ", got ", names.size()));
  }
  constexpr uint64_t kRoots = uint64_t{1} << 32;
  uint64_t parent = kRoots + root;
  for (const uint64_t name : names) {
    const auto [block, added] = blocks_.try_emplace({parent, name}, trace_.distinct_blocks_);
    trace_.distinct_blocks_ += added ? 1 : 0;
    trace_.blocks_.push_back(block->second);
    parent = block->second;
  }
  trace_.requests_.push_back(request);
  trace_.ends_.push_back(trace_.blocks_.size());
  return absl::OkStatus();
}

Trace TraceBuilder::Build() {
  std::vector<size_t> order(trace_.requests_.size());
  std::iota(order.begin(), order.end(), size_t{0});
  const auto earlier = [this](size_t a, size_t b) {
    return trace_.requests_[a].arrival < trace_.requests_[b].arrival;
  };
  if (std::is_sorted(order.begin(), order.end(), earlier)) return std::move(trace_);
  std::stable_sort(order.begin(), order.end(), earlier);
  Trace sorted;
  sorted.block_tokens_ = trace_.block_tokens_;
  sorted.distinct_blocks_ = trace_.distinct_blocks_;
  sorted.requests_.reserve(trace_.requests_.size());
  sorted.blocks_.reserve(trace_.blocks_.size());
  for (const size_t request : order) {
    const absl::Span<const uint32_t> path = trace_.path(request);
    sorted.requests_.push_back(trace_.requests_[request]);
    sorted.blocks_.insert(sorted.blocks_.end(), path.begin(), path.end());
    sorted.ends_.push_back(sorted.blocks_.size());
  }
  return sorted;
}

}  // namespace palimpsest::replay
