#include "worker/compute/cuda/step_packer.h"

#include <algorithm>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "worker/compute/cuda/decode_plan.h"

namespace palimpsest::cuda {
namespace {

int32_t CeilDiv(int32_t a, int32_t b) { return (a + b - 1) / b; }

int32_t Past(const SequenceChunk& chunk) {
  return chunk.first_position + static_cast<int32_t>(chunk.tokens.size());
}

SamplingRow RowOf(const SequenceChunk& chunk, int32_t row) {
  SamplingRow out;
  if (chunk.sampling == nullptr) return out;
  const SamplingParams& params = chunk.sampling->params;
  out.seed = params.seed;
  out.output_index = static_cast<uint64_t>(chunk.sampling->output_index);
  out.temperature = params.temperature;
  out.top_k = params.top_k;
  out.top_p = params.top_p;
  out.min_p = params.min_p;
  out.repetition_penalty = params.repetition_penalty;
  out.logprobs = params.logprobs;
  if (chunk.token_from >= 0) out.input_row = row;
  return out;
}

LatentMachine MachineOf(const PackerOptions& options) {
  return {options.latent_heads, options.multiprocessors};
}

}  // namespace

StagingLayout StagingLayout::For(const StepCounts& counts) {
  StagingLayout layout;
  size_t end = 0;
  const auto place = [&end](size_t& offset, int64_t count, size_t size) {
    offset = end;
    end = (end + static_cast<size_t>(count) * size + 15) / 16 * 16;
  };
  place(layout.tokens, counts.rows, 4);
  place(layout.positions, counts.rows, 4);
  place(layout.kv_slots, counts.rows, 8);
  place(layout.sample_rows, counts.samples, 4);
  place(layout.sampling, counts.samples, sizeof(SamplingRow));
  place(layout.decode_blocks, counts.decodes + 1, 4);
  place(layout.decode_last, counts.decodes, 4);
  place(layout.tile_sequence, counts.decode_tiles, 4);
  place(layout.tile_chunk, counts.decode_tiles, 4);
  place(layout.valid_tiles, counts.decode_tiles, sizeof(bool));
  place(layout.first_tile, counts.decodes + 1, 4);
  place(layout.chunk_tokens, 1, 4);
  place(layout.prefill_rows, counts.prefills + 1, 4);
  place(layout.prefill_blocks, counts.prefills + 1, 4);
  place(layout.prefill_last, counts.prefills, 4);
  if (counts.latent_blocks > 0) {
    const auto plan = LatentPlanLayout::For(counts.latent_pieces, counts.latent_blocks);
    place(layout.latent_plan, static_cast<int64_t>(plan.bytes), 1);
  }
  layout.ints = end;
  return layout;
}

size_t MaxStagingBytes(const PackerOptions& options) {
  StepCounts most;
  most.rows = options.max_rows;
  most.samples = most.decodes = most.prefills = options.max_sequences;
  if (options.latent_heads > 0) {
    most.latent_pieces =
        MaxLatentPieces(MachineOf(options), options.max_rows, options.max_sequences);
    most.latent_blocks = options.multiprocessors;
  } else {
    most.decode_tiles =
        MaxDecodeTiles(options.max_sequences, options.kv_heads, options.multiprocessors);
  }
  return StagingLayout::For(most).ints + static_cast<size_t>(options.max_ints) * 4;
}

StepPacker::StepPacker(const PackerOptions& options)
    : options_(options), latent_planner_(MachineOf(options)) {}

bool StepPacker::PlainDecode(const SequenceChunk& chunk) const {
  return (options_.cuda_cores || options_.tensor_cores) &&
         Past(chunk) <= options_.windowless_tokens;
}

bool StepPacker::TakenByDecode(const SequenceChunk& chunk) const {
  return chunk.tokens.size() == 1 && (options_.masked || PlainDecode(chunk));
}

bool StepPacker::IsDecode(const StepPlan& plan) const {
  return std::all_of(plan.chunks.begin(), plan.chunks.end(),
                     [this](const SequenceChunk& chunk) { return TakenByDecode(chunk); });
}

absl::Status StepPacker::ValidateChunk(const SequenceChunk& chunk,
                                       absl::Span<const int32_t> previous_slots) const {
  if (chunk.tokens.empty()) return absl::InvalidArgumentError("it has no tokens");
  const int64_t past = int64_t{chunk.first_position} + static_cast<int64_t>(chunk.tokens.size());
  if (chunk.first_position < 0 || past > options_.max_position) {
    return absl::InvalidArgumentError(absl::StrCat("positions ", chunk.first_position, " to ",
                                                   past - 1, " are not within the model's ",
                                                   options_.max_position));
  }
  if (chunk.token_from >= 0) {
    if (chunk.tokens.size() != 1 ||
        static_cast<size_t>(chunk.token_from) >= previous_slots.size() ||
        previous_slots[chunk.token_from] < 0) {
      return absl::InvalidArgumentError(
          absl::StrCat("it continues chunk ", chunk.token_from,
                       " of the step in flight, which samples no token there"));
    }
  } else {
    for (const TokenId token : chunk.tokens) {
      if (token < 0 || token >= options_.vocab_size) {
        return absl::InvalidArgumentError(absl::StrCat(
            "token ", token, " is not within the vocabulary of ", options_.vocab_size));
      }
    }
  }
  const int64_t blocks = (past + options_.block_tokens - 1) / options_.block_tokens;
  if (static_cast<int64_t>(chunk.block_table.size()) < blocks) {
    return absl::InvalidArgumentError(absl::StrCat(
        past, " positions need ", blocks, " blocks, the table has ", chunk.block_table.size()));
  }
  int64_t oldest = 0;
  if (options_.window > 0) {
    oldest = std::max<int64_t>(0, int64_t{chunk.first_position} - options_.window + 1);
  }
  for (int64_t b = oldest / options_.block_tokens; b < blocks; ++b) {
    if (chunk.block_table[b] == BlockId(0)) {
      return absl::InvalidArgumentError(
          absl::StrCat("block ", b, " of the table is the null block, but is read"));
    }
  }
  if (chunk.sampling == nullptr || chunk.sampling->params.repetition_penalty == 1.0f) {
    return absl::OkStatus();
  }
  for (const TokenId token : chunk.sampling->history) {
    if (token < 0 || token >= options_.vocab_size) {
      return absl::InvalidArgumentError(
          absl::StrCat("token ", token, " of its history is not within the vocabulary of ",
                       options_.vocab_size));
    }
  }
  return absl::OkStatus();
}

absl::Status StepPacker::Validate(const StepPlan& plan,
                                  absl::Span<const int32_t> previous_slots) const {
  if (plan.chunks.empty()) return absl::InvalidArgumentError("the plan has no chunks");
  int64_t rows = 0, ints = options_.max_sequences;
  for (size_t i = 0; i < plan.chunks.size(); ++i) {
    const SequenceChunk& chunk = plan.chunks[i];
    if (absl::Status status = ValidateChunk(chunk, previous_slots); !status.ok()) {
      return absl::InvalidArgumentError(absl::StrCat("chunk ", i, ": ", status.message()));
    }
    rows += static_cast<int64_t>(chunk.tokens.size());
    ints += CeilDiv(Past(chunk), options_.block_tokens);
    if (chunk.sampling != nullptr && chunk.sampling->params.repetition_penalty != 1.0f) {
      ints += static_cast<int64_t>(chunk.sampling->history.size());
    }
  }
  if (rows <= options_.max_rows && ints <= options_.max_ints &&
      plan.chunks.size() <= static_cast<size_t>(options_.max_sequences)) {
    return absl::OkStatus();
  }
  return absl::InvalidArgumentError(
      absl::StrCat("the plan has ", plan.chunks.size(), " chunks, ", rows, " tokens and ", ints,
                   " block ids and history tokens; the runner takes ", options_.max_sequences, ", ",
                   options_.max_rows, " and ", options_.max_ints));
}

void StepPacker::AddAttentionCounts(StepCounts& counts) const {
  const int32_t sequences = counts.decodes + counts.prefills;
  if (options_.latent_heads > 0) {
    counts.latent_pieces = LatentPieces(MachineOf(options_), counts.rows, sequences);
    counts.latent_blocks = options_.multiprocessors;
  } else if (counts.decodes > 0 && (!options_.fused_decode || options_.masked)) {
    counts.decode_tiles =
        MaxDecodeTiles(counts.decodes, options_.kv_heads, options_.multiprocessors);
  }
}

StepCounts StepPacker::CountsOfGraph(int32_t rows) const {
  StepCounts counts;
  counts.rows = counts.samples = counts.decodes = rows;
  AddAttentionCounts(counts);
  return counts;
}

StepCounts StepPacker::Count(const StepPlan& plan) const {
  StepCounts counts;
  for (const SequenceChunk& chunk : plan.chunks) {
    counts.rows += static_cast<int32_t>(chunk.tokens.size());
    counts.samples += chunk.sampling != nullptr ? 1 : 0;
    ++(TakenByDecode(chunk) ? counts.decodes : counts.prefills);
  }
  AddAttentionCounts(counts);
  return counts;
}

LatentGrid StepPacker::LatentGridOf(const StepCounts& counts) const {
  if (options_.latent_heads == 0) return {};
  return LatentGridFor(MachineOf(options_), counts.rows, counts.decodes + counts.prefills);
}

// Writes one step's arrays.
class StepPacker::Writer {
 public:
  Writer(const PackerOptions& options, std::byte* buffer, PackedStep& step)
      : options_(options), buffer_(buffer), step_(step), ints_(At<int32_t>(step.layout.ints)) {}

  template <typename T>
  T* At(size_t offset) const {
    return reinterpret_cast<T*>(buffer_ + offset);
  }

  // Tokens, positions and KV places of a chunk's rows, from row `row`.
  void Rows(const SequenceChunk& chunk, absl::Span<const int32_t> previous_slots, int32_t row) {
    for (size_t t = 0; t < chunk.tokens.size(); ++t, ++row) {
      const int32_t position = chunk.first_position + static_cast<int32_t>(t);
      const BlockId block = chunk.block_table[position / options_.block_tokens];
      const int32_t token =
          chunk.token_from < 0 ? chunk.tokens[t] : -1 - previous_slots[chunk.token_from];
      Row(row, token, position, block.value());
    }
  }

  void Row(int32_t row, int32_t token, int32_t position, int64_t block) {
    At<int32_t>(step_.layout.tokens)[row] = token;
    At<int32_t>(step_.layout.positions)[row] = position;
    At<int64_t>(step_.layout.kv_slots)[row] =
        block * options_.block_elements +
        position % options_.block_tokens * options_.token_elements;
  }

  // Appends the blocks that a chunk's rows read; returns how many tokens lie in them.
  int32_t Blocks(const SequenceChunk& chunk) {
    const int32_t past = Past(chunk);
    int32_t first = 0;
    if (options_.window > 0) {
      first = std::max(0, chunk.first_position - options_.window + 1) / options_.block_tokens;
    }
    for (int32_t b = first; b < CeilDiv(past, options_.block_tokens); ++b) {
      ints_[used_++] = static_cast<int32_t>(chunk.block_table[b].value());
    }
    return past - first * options_.block_tokens;
  }

  void NullBlock() { ints_[used_++] = options_.null_block; }

  void Sample(const SequenceChunk& chunk, int32_t slot, int32_t row) {
    SamplingRow sampling = RowOf(chunk, row);
    if (sampling.repetition_penalty != 1.0f) {
      const absl::Span<const TokenId> history = chunk.sampling->history;
      sampling.history_begin = static_cast<int32_t>(used_);
      sampling.history_count = static_cast<int32_t>(history.size());
      std::copy(history.begin(), history.end(), ints_ + used_);
      used_ += history.size();
    }
    step_.any_logprobs |= sampling.logprobs >= 0;
    At<SamplingRow>(step_.layout.sampling)[slot] = sampling;
    At<int32_t>(step_.layout.sample_rows)[slot] = row;
  }

  int32_t LastBlockTokens(int32_t tokens) const { return (tokens - 1) % options_.block_tokens + 1; }

  int32_t used() const { return static_cast<int32_t>(used_); }

 private:
  const PackerOptions& options_;
  std::byte* const buffer_;
  PackedStep& step_;
  int32_t* const ints_;
  size_t used_ = 0;
};

void StepPacker::PlanDecodeTiles(Writer& writer, PackedStep& step) const {
  const StagingLayout& at = step.layout;
  const int32_t chunk_tokens = DecodeChunkTokens(lengths_, step.counts.decode_tiles);
  *writer.At<int32_t>(at.chunk_tokens) = chunk_tokens;
  const auto tiles = static_cast<size_t>(step.counts.decode_tiles);
  step.split = FillDecodeTiles(lengths_, chunk_tokens,
                               {absl::MakeSpan(writer.At<int32_t>(at.tile_sequence), tiles),
                                absl::MakeSpan(writer.At<int32_t>(at.tile_chunk), tiles),
                                absl::MakeSpan(writer.At<bool>(at.valid_tiles), tiles),
                                absl::MakeSpan(writer.At<int32_t>(at.first_tile),
                                               static_cast<size_t>(step.counts.decodes) + 1)});
}

void StepPacker::Pack(const StepPlan& plan, absl::Span<const int32_t> previous_slots,
                      int32_t graph_rows, std::byte* buffer, PackedStep& step) {
  step.counts = graph_rows > 0 ? CountsOfGraph(graph_rows) : Count(plan);
  step.layout = StagingLayout::For(step.counts);
  step.latent_grid = LatentGridOf(step.counts);
  step.split = step.any_logprobs = false;
  step.window_free = true;
  step.prefill_tokens.clear();
  step.slots.assign(plan.chunks.size(), -1);
  lengths_.clear();
  latent_sequences_.clear();
  first_rows_.assign(plan.chunks.size(), 0);
  step.first_blocks.assign(plan.chunks.size(), 0);
  step.last_rows.assign(plan.chunks.size(), 0);
  step.sampled_chunk = -1;
  Writer writer(options_, buffer, step);
  const StagingLayout& at = step.layout;

  int32_t row = 0;
  auto* decode_blocks = writer.At<int32_t>(at.decode_blocks);
  decode_blocks[0] = 0;
  const auto decode = [&](int32_t tokens) {
    writer.At<int32_t>(at.decode_last)[row] = writer.LastBlockTokens(tokens);
    lengths_.push_back(tokens);
    decode_blocks[++row] = writer.used();
  };
  bool plain = true;
  for (size_t c = 0; c < plan.chunks.size(); ++c) {
    if (graph_rows == 0 && !TakenByDecode(plan.chunks[c])) continue;
    plain = plain && PlainDecode(plan.chunks[c]);
    first_rows_[c] = row;
    writer.Rows(plan.chunks[c], previous_slots, row);
    step.first_blocks[c] = writer.used();
    latent_sequences_.push_back({row, 1, writer.used(), Past(plan.chunks[c])});
    decode(writer.Blocks(plan.chunks[c]));
  }
  int64_t decode_tokens = 0;
  for (const int32_t length : lengths_) decode_tokens += length;
  const bool tensor_cores = options_.tensor_cores &&
                            (!options_.cuda_cores || decode_tokens >= options_.tensor_core_tokens);
  step.kernel = !plain         ? DecodeKernel::kMasked
                : tensor_cores ? DecodeKernel::kTensorCores
                               : DecodeKernel::kCudaCores;
  while (row < graph_rows) {
    writer.Row(row, 0, 0, options_.null_block);
    writer.NullBlock();
    decode(1);
  }

  auto* prefill_rows = writer.At<int32_t>(at.prefill_rows);
  auto* prefill_blocks = writer.At<int32_t>(at.prefill_blocks);
  prefill_rows[0] = 0;
  prefill_blocks[0] = writer.used();
  int32_t prefill = 0;
  for (size_t c = 0; graph_rows == 0 && c < plan.chunks.size(); ++c) {
    const SequenceChunk& chunk = plan.chunks[c];
    if (TakenByDecode(chunk)) continue;
    first_rows_[c] = row;
    writer.Rows(chunk, previous_slots, row);
    step.first_blocks[c] = writer.used();
    latent_sequences_.push_back(
        {row, static_cast<int32_t>(chunk.tokens.size()), writer.used(), Past(chunk)});
    const int32_t tokens = writer.Blocks(chunk);
    step.prefill_tokens.push_back(tokens);
    step.window_free &= Past(chunk) <= options_.windowless_tokens;
    writer.At<int32_t>(at.prefill_last)[prefill] = writer.LastBlockTokens(tokens);
    row += static_cast<int32_t>(chunk.tokens.size());
    ++prefill;
    prefill_rows[prefill] = row - step.counts.decodes;
    prefill_blocks[prefill] = writer.used();
  }

  if (options_.latent_heads > 0) {
    // Padding rows have no piece: nobody reads what they hold.
    latent_planner_.Fill(
        latent_sequences_, step.latent_grid,
        LatentPlanLayout::For(step.counts.latent_pieces, step.counts.latent_blocks),
        writer.At<std::byte>(at.latent_plan));
  } else if (step.counts.decode_tiles > 0) {
    PlanDecodeTiles(writer, step);
    if (options_.fused_decode && step.kernel == DecodeKernel::kCudaCores) step.split = false;
  }

  int32_t slot = 0;
  for (size_t c = 0; c < plan.chunks.size(); ++c) {
    const SequenceChunk& chunk = plan.chunks[c];
    step.last_rows[c] = first_rows_[c] + static_cast<int32_t>(chunk.tokens.size()) - 1;
    if (chunk.sampling == nullptr && graph_rows == 0) continue;
    if (chunk.sampling != nullptr) step.slots[c] = slot;
    writer.Sample(chunk, slot++, step.last_rows[c]);
  }
  for (; slot < step.counts.samples; ++slot) writer.Sample(SequenceChunk(), slot, slot);
  step.bytes = at.ints + static_cast<size_t>(writer.used()) * 4;
}

}  // namespace palimpsest::cuda
