#include "worker/core/plan_copy.h"

#include <optional>

#include "worker/core/check.h"

namespace palimpsest {

PlanCopy::PlanCopy(const StepPlan& plan) : chunks_(plan.chunks.size()), plan_(plan) {
  for (size_t i = 0; i < chunks_.size(); ++i) {
    const SequenceChunk& from = plan.chunks[i];
    Chunk& own = chunks_[i];
    own.tokens.assign(from.tokens.begin(), from.tokens.end());
    own.blocks.assign(from.block_table.begin(), from.block_table.end());
    SequenceChunk& to = plan_.chunks[i];
    to.tokens = own.tokens;
    to.block_table = own.blocks;
    if (from.sampling == nullptr) continue;
    own.sampling = *from.sampling;
    own.history.assign(from.sampling->history.begin(), from.sampling->history.end());
    own.sampling.history = own.history;
    to.sampling = &own.sampling;
  }
}

void PlanCopy::Resolve(const StepResult& previous) {
  for (size_t i = 0; i < chunks_.size(); ++i) {
    const int32_t from = plan_.chunks[i].token_from;
    if (from < 0) continue;
    Chunk& own = chunks_[i];
    PALIMPSEST_CHECK(own.tokens.size() == 1);
    const auto source = static_cast<size_t>(from);
    const bool known = source < previous.sampled.size() && previous.sampled[source].has_value();
    own.tokens[0] = known ? previous.sampled[source]->token : 0;
    own.history.push_back(own.tokens[0]);
    own.sampling.history = own.history;
    plan_.chunks[i].token_from = -1;
  }
}

}  // namespace palimpsest
