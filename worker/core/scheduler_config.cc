#include "worker/core/scheduler_config.h"

#include <algorithm>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"

namespace palimpsest {

absl::Status SchedulerConfig::Validate() const {
  const auto positive = [](absl::string_view name, int64_t value) {
    return value > 0
               ? absl::OkStatus()
               : absl::InvalidArgumentError(absl::StrCat(name, " must be at least 1; got ", value));
  };
  for (const auto& [name, value] :
       {std::pair<absl::string_view, int64_t>{"slab size", geometry.slab_bytes.count()},
        {"KV block size", geometry.block_bytes.count()},
        {"tokens per KV block", geometry.block_tokens},
        {"KV region in slabs", geometry.region_slabs},
        {"vocabulary size", vocab_size},
        {"max_sequence_tokens", max_sequence_tokens},
        {"max_batch_sequences", max_batch_sequences},
        {"queue_capacity", queue_capacity}}) {
    if (absl::Status status = positive(name, value); !status.ok()) return status;
  }
  if (max_kv_slabs < 1 || max_kv_slabs > geometry.region_slabs) {
    return absl::InvalidArgumentError(absl::StrCat("max_kv_slabs must be from 1 to the region's ",
                                                   geometry.region_slabs, "; got ", max_kv_slabs));
  }
  if (sliding_window < 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("the sliding window must not be negative; got ", sliding_window));
  }
  if (max_step_tokens < max_batch_sequences) {
    return absl::InvalidArgumentError(absl::StrCat(
        "max_step_tokens (", max_step_tokens, ") must be at least max_batch_sequences (",
        max_batch_sequences, "): every running sequence decodes one token in every step"));
  }
  if (swap_blocks < 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("swap_blocks must not be negative; got ", swap_blocks));
  }
  if (pipeline_depth < 1 || pipeline_depth > kMaxPipelineDepth) {
    return absl::InvalidArgumentError(absl::StrCat("pipeline_depth must be from 1 to ",
                                                   kMaxPipelineDepth, "; got ", pipeline_depth));
  }
  return absl::OkStatus();
}

int32_t SchedulerConfig::LongestSequence() const {
  const int32_t capacity = capacity_blocks();
  // The last token of a sequence needs no KV.
  if (PeakBlocks(max_sequence_tokens - 1) <= capacity) return max_sequence_tokens;
  return static_cast<int32_t>(
      std::min<int64_t>(max_sequence_tokens, int64_t{capacity} * geometry.block_tokens + 1));
}

int32_t SchedulerConfig::PeakBlocks(int32_t tokens) const {
  const int32_t all = geometry.BlocksFor(tokens);
  if (sliding_window == 0) return all;
  // The chunks in flight and the window before them, which need not start on a block border.
  const int64_t seen = sliding_window + int64_t{pipeline_depth} * max_step_tokens;
  return static_cast<int32_t>(std::min<int64_t>(all, seen / geometry.block_tokens + 2));
}

absl::Status SchedulerConfig::CheckRequest(const SequenceRequest& request) const {
  const auto size = static_cast<int64_t>(request.prompt.size());
  const int32_t longest = LongestSequence();
  if (size == 0) return absl::InvalidArgumentError("the prompt is empty; send at least one token");
  // An output that another worker brought to the very end only needs to be told so.
  const bool complete = size == longest && request.output_offset > 0;
  if (size >= longest && !complete) {
    return absl::InvalidArgumentError(absl::StrCat(
        "the prompt has ", size, " tokens, but a sequence has at most ", longest,
        ", of which the output needs at least one",
        longest == max_sequence_tokens
            ? std::string()
            : absl::StrCat(" (the model allows ", max_sequence_tokens, ", but the ", max_kv_slabs,
                           " KV slabs that this worker may hold have room for ", capacity_blocks(),
                           " blocks of ", geometry.block_tokens, " tokens)")));
  }
  if (request.output_offset < 0 || request.output_offset >= size) {
    return absl::InvalidArgumentError(absl::StrCat("output_offset must be from 0 to ", size - 1,
                                                   " for a prompt of ", size, " tokens; got ",
                                                   request.output_offset));
  }
  for (int64_t i = 0; i < size; ++i) {
    if (request.prompt[i] < 0 || request.prompt[i] >= vocab_size) {
      return absl::InvalidArgumentError(absl::StrCat("token ", i, " of the prompt is ",
                                                     request.prompt[i], "; ids go from 0 to ",
                                                     vocab_size - 1));
    }
  }
  return absl::OkStatus();
}

}  // namespace palimpsest
