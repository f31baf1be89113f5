// Turns a step plan into the one buffer that is copied to the GPU for the step. Pure: host memory
// in, host memory out; everything the kernels need to know about the step is decided here.
//
// Rows of the step: first the chunks of one token that the decode kernel takes, in order of the
// plan, then the tokens of the other chunks. In a graph step there are only the former, padded to
// the graph's size with rows that live in the null block.
#ifndef PALIMPSEST_WORKER_COMPUTE_CUDA_STEP_PACKER_H_
#define PALIMPSEST_WORKER_COMPUTE_CUDA_STEP_PACKER_H_

#include <cstddef>
#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "common/ids.h"
#include "worker/compute/cuda/decode_kernel.h"
#include "worker/compute/cuda/latent_plan.h"
#include "worker/compute/cuda/sampling_row.h"
#include "worker/core/step_plan.h"

namespace palimpsest::cuda {

// Sizes that fix where everything lies in the buffer.
struct StepCounts {
  int32_t rows = 0;
  int32_t samples = 0;
  int32_t decodes = 0;
  int32_t decode_tiles = 0;
  int32_t prefills = 0;
  // With latent attention, which has no tiles: pieces of its plan, and thread blocks of a launch.
  int32_t latent_pieces = 0;
  int32_t latent_blocks = 0;

  friend bool operator==(const StepCounts&, const StepCounts&) = default;
};

// Byte offsets of the arrays; each is aligned to 16. `ints`, the last, is as long as the step
// needs: block ids of the decodes, then of the prefills, then histories.
struct StagingLayout {
  size_t tokens = 0;          // int32 [rows], see EmbedArgs
  size_t positions = 0;       // int32 [rows]
  size_t kv_slots = 0;        // int64 [rows]
  size_t sample_rows = 0;     // int32 [samples]
  size_t sampling = 0;        // SamplingRow [samples]
  size_t decode_blocks = 0;   // int32 [decodes + 1]
  size_t decode_last = 0;     // int32 [decodes]
  size_t tile_sequence = 0;   // int32 [decode_tiles]
  size_t tile_chunk = 0;      // int32 [decode_tiles]
  size_t valid_tiles = 0;     // bool [decode_tiles]
  size_t first_tile = 0;      // int32 [decodes + 1]
  size_t chunk_tokens = 0;    // int32
  size_t prefill_rows = 0;    // int32 [prefills + 1]
  size_t prefill_blocks = 0;  // int32 [prefills + 1]
  size_t prefill_last = 0;    // int32 [prefills]
  size_t latent_plan = 0;     // LatentPlanLayout::For(latent_pieces, latent_blocks)
  size_t ints = 0;

  static StagingLayout For(const StepCounts& counts);
};

struct PackerOptions {
  int32_t vocab_size = 0;
  int32_t max_position = 0;
  int32_t block_tokens = 0;
  int64_t block_elements = 0;  // from one block to the next
  int64_t token_elements = 0;  // of one token's keys (or latent) in one layer
  int32_t kv_heads = 0;
  int32_t latent_heads = 0;  // query heads of latent attention; 0: another attention
  int32_t window = 0;        // of every layer, behind which blocks are not read; 0: none
  // A row that attends to at most this many tokens sees all of them in each layer.
  int32_t windowless_tokens = INT32_MAX;
  int32_t null_block = 0;
  // Kernels for decodes. kMasked takes what the others cannot; where there are both of them, the
  // one on tensor cores from this many tokens on.
  bool cuda_cores = true;
  bool tensor_cores = true;
  bool masked = false;
  int32_t tensor_core_tokens = 0;
  // What kCudaCores stands for cuts its work itself and needs no tiles.
  bool fused_decode = false;
  int32_t multiprocessors = 0;
  // Steps beyond these are refused.
  int32_t max_rows = 0;
  int32_t max_sequences = 0;
  int64_t max_ints = 0;
};

// The largest a buffer can get.
size_t MaxStagingBytes(const PackerOptions& options);

struct PackedStep {
  StepCounts counts;
  StagingLayout layout;
  size_t bytes = 0;
  // Whether a decode has several tiles, whose partial results must be merged.
  bool split = false;
  DecodeKernel kernel = DecodeKernel::kCudaCores;
  LatentGrid latent_grid;
  bool any_logprobs = false;
  // Whether no prefill row reaches beyond a window.
  bool window_free = true;
  // Tokens that each prefill attends to, after cutting blocks that left the window.
  std::vector<int32_t> prefill_tokens;
  // For each chunk of the plan its row in the results, or -1.
  std::vector<int32_t> slots;
  // For each chunk the row of its last token, and where its blocks begin in the buffer's integers.
  std::vector<int32_t> last_rows;
  std::vector<int32_t> first_blocks;
  // The chunk whose last token heads are sampled over, and the tokens that it sees; -1: none. Not
  // of the packer.
  int32_t sampled_chunk = -1;
  int32_t sampled_tokens = 0;
};

class StepPacker {
 public:
  explicit StepPacker(const PackerOptions& options);

  // InvalidArgument, naming the chunk, if the plan breaks step_plan.h's contract or is larger than
  // the options allow. `previous_slots` are those of the plan submitted before, empty if none is in
  // flight.
  absl::Status Validate(const StepPlan& plan, absl::Span<const int32_t> previous_slots) const;

  // Whether every chunk of a valid plan is one token for the decode kernel.
  bool IsDecode(const StepPlan& plan) const;

  // Of a decode step that is padded to so many rows.
  StepCounts CountsOfGraph(int32_t rows) const;
  LatentGrid LatentGridOf(const StepCounts& counts) const;

  // Fills `buffer` (MaxStagingBytes) for a valid plan. `graph_rows` > 0: a decode step padded to
  // that many rows, of which each has a result.
  void Pack(const StepPlan& plan, absl::Span<const int32_t> previous_slots, int32_t graph_rows,
            std::byte* buffer, PackedStep& step);

 private:
  class Writer;

  absl::Status ValidateChunk(const SequenceChunk& chunk,
                             absl::Span<const int32_t> previous_slots) const;
  // Whether a decode kernel that knows no windows can take a chunk of one token.
  bool PlainDecode(const SequenceChunk& chunk) const;
  bool TakenByDecode(const SequenceChunk& chunk) const;
  StepCounts Count(const StepPlan& plan) const;
  void AddAttentionCounts(StepCounts& counts) const;
  void PlanDecodeTiles(Writer& writer, PackedStep& step) const;

  const PackerOptions options_;
  std::vector<int32_t> lengths_;
  std::vector<int32_t> first_rows_;
  LatentPlanner latent_planner_;
  std::vector<LatentSequence> latent_sequences_;
};

}  // namespace palimpsest::cuda

#endif  // PALIMPSEST_WORKER_COMPUTE_CUDA_STEP_PACKER_H_
