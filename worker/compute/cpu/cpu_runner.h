// The CPU back-end: runs step plans with its own threads and kernels.
//
// Determinism: the logits of a token and the KV it writes depend on its sequence's tokens alone,
// bit for bit; not on chunking, on what else is in the step, on the number of threads or on the
// instruction set (kernels.h). Lossy heads (head_profile.h) change logits, by positions alone, so
// that this holds all the same. Samples of heads change nothing.
//
// Latent attention is computed in its absorbed form in prefill too: queries meet the cached latents
// directly, as in decode, so that the phase does not change a bit either.
//
// Owns its threads and activations; parameters, KV and gate belong to the caller and must outlive
// it. Threads and blocking: as model_runner.h says. AwaitStage is called by the runner's threads,
// one at a time, stage by stage in order (0 embedding, 1 + i layer i, then the head), each before
// the first read of that stage; the head's only if the step samples. Each layer is released before
// the next stage is asked for; embedding and head, which may share a matrix, when the step is over.
// Nothing is allocated in a step unless it is larger than all before it.
#ifndef PALIMPSEST_WORKER_COMPUTE_CPU_CPU_RUNNER_H_
#define PALIMPSEST_WORKER_COMPUTE_CPU_CPU_RUNNER_H_

#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "worker/compute/cpu/float_buffer.h"
#include "worker/compute/cpu/kernels.h"
#include "worker/compute/cpu/thread_team.h"
#include "worker/core/head_profile.h"
#include "worker/core/head_sampler.h"
#include "worker/core/model_runner.h"
#include "worker/core/step_plan.h"
#include "worker/model/image_layout.h"
#include "worker/model/model_config.h"

namespace palimpsest {

struct CpuRunnerOptions {
  int threads = 0;  // 0: one per CPU this process may run on
  int32_t block_tokens = 16;
  const Kernels* kernels = nullptr;  // none: the fastest that this machine supports
  // Neither with latent attention, which has no KV heads; nothing lossy with sliding windows.
  HeadSampling head_sampling;
  LossyHeads lossy_heads;
};

class CpuRunner final : public ModelRunner {
 public:
  // InvalidArgument if the config's shape is one that the kernels do not take, or if
  // memory.kv_block_bytes does not hold a block. `gate` may be null: everything is readable.
  static absl::StatusOr<std::unique_ptr<CpuRunner>> Create(const ModelConfig& config,
                                                           const ImageLayout& layout,
                                                           const ModelMemory& memory,
                                                           ParameterGate* gate,
                                                           const CpuRunnerOptions& options);

  absl::Status Submit(const StepPlan& plan) override;
  absl::StatusOr<StepResult> Wait() override;
  absl::Status SetRotation(const Rotation& rotation) override;

  // Logits of the last step's chunk, vocab_size floats; empty if that chunk sampled nothing. Valid
  // between a successful Wait and the next Submit.
  absl::Span<const float> logits(size_t chunk) const;

  int threads() const { return team_.size(); }
  const Kernels& kernels() const { return kernels_; }

 private:
  // What the step needs of a chunk of the plan.
  struct Chunk {
    int32_t tokens;
    int32_t first_position;
    int64_t first_block;  // of its table in block_tables_
  };

  // One token of the step.
  struct Row {
    TokenId token;
    int32_t position;
    int32_t chunk;
  };

  // Attention of some tokens of one chunk and some groups of query heads: the unit of work of that
  // phase.
  struct AttentionItem {
    int32_t chunk;
    int32_t first_row;
    int32_t tokens;
    int32_t group;
    int32_t groups;
    int64_t cost;
  };

  struct ThreadState {
    FloatBuffer attention;
    FloatBuffer normalized;
    FloatBuffer sampled;  // outputs of a KV head, with far keys and without
    SamplingScratch sampling;
  };

  CpuRunner(const ModelConfig& config, const ImageLayout& layout, const ModelMemory& memory,
            ParameterGate* gate, const CpuRunnerOptions& options);

  absl::Status Validate(const StepPlan& plan) const;
  absl::Status ValidateChunk(const SequenceChunk& chunk) const;
  void CopyChunks(const StepPlan& plan);
  void PlanRows(const StepPlan& plan);
  void PlanHeadSample(const StepPlan& plan);
  void PlanAttention();
  void ReserveBuffers();

  using Member = ThreadTeam::Member;

  // What each thread does in a step. Every phase is one ForEach; a thread may be phases behind.
  void RunStep(Member& member);
  void Embed(Member& member);
  void RunLayer(int layer, Member& member);
  void RunHead(Member& member);

  // Asks the gate for a stage, or tells it that the step is done with it; called by one thread
  // between phases.
  void OpenStage(int stage);
  void CloseStage(int stage);

  // A linear layer and what follows it.
  using ProjectionKernel = void (*)(const Projection&, int64_t, int64_t);
  struct Linear {
    ProjectionKernel kernel;
    const MatrixPlacement& matrix;
    const VectorPlacement& bias;
    Nonlinearity nonlinearity = Nonlinearity::kNone;
  };
  // How the input of a linear layer is made from the residual stream: the norm of `count` rows, all
  // of them or those of `indexes`.
  struct NormInput {
    const VectorPlacement& weight;
    const VectorPlacement& bias;
    absl::Span<const int32_t> indexes;
    int64_t count = 0;
  };
  void Normalize(const float* x, const VectorPlacement& weight, const VectorPlacement& bias,
                 float* out) const;
  void NormalizeRows(const NormInput& norm, int64_t first, int64_t last, float* out) const;
  // One phase, or two if there are many rows.
  void ProjectNormalized(const Linear& linear, const NormInput& norm, FloatBuffer& output,
                         int64_t output_stride, Member& member);
  Projection MakeProjection(const Linear& linear, FloatBuffer& output, int64_t output_stride) const;
  // Adds a projection of all rows of `input`, and its norm if the model has one there, to the
  // residual stream: one phase or two.
  void ProjectToResidual(const Linear& linear, const FloatBuffer& input, int64_t input_stride,
                         const VectorPlacement& post_norm, Member& member,
                         absl::FunctionRef<void()> finish);

  // In cpu_runner_attention.cc. From the residual stream to attention_.
  void RunAttention(int layer, Member& member);
  // The layer's part of StepResult.head_sample.
  void SampleHeads(int layer, Member& member);
  float EffectOfFarKeys(int layer, const AttentionItem& item, int thread);
  void RunLatentAttention(int layer, Member& member);
  void NormalizeHead(const VectorPlacement& weight, float* head) const;
  void RotateAndStore(int layer, int64_t row, int32_t kv_head);
  void StoreKv(const float* from, int64_t size, std::byte* to) const;
  // Norms the latents of a row, rotates its key and writes both to the cache.
  void StoreLatent(int layer, int64_t row);
  // Turns the queries of one head, `query` being the first row's, into ones that meet latents;
  // computes panels first .. last - 1 of each.
  void AbsorbQueries(int layer, const float* query, int64_t query_stride, int64_t head,
                     int64_t first, int64_t last);
  void ProjectValues(int layer, int64_t head, int64_t first, int64_t last);
  // Not for latent attention.
  AttentionTask TaskOf(int layer, const AttentionItem& item) const;
  AttentionTask LatentTaskOf(int layer, const AttentionItem& item);
  void Attend(int layer, const AttentionItem& item, int thread);
  std::byte* CacheOf(int64_t row) const;

  const float* VectorAt(const VectorPlacement& placement) const;
  int64_t rows() const { return static_cast<int64_t>(rows_.size()); }

  const ModelConfig config_;
  const ImageLayout layout_;
  const ModelMemory memory_;
  ParameterGate* const gate_;
  const int32_t block_tokens_;
  const Kernels& kernels_;
  const std::vector<float> frequencies_;
  const HeadSampling head_sampling_;
  const LossyHeads lossy_heads_;
  // Query heads are attended to in groups: those that share a KV head or, with latent attention,
  // where all share one, as many as make good units of work.
  const int32_t group_;
  const int32_t groups_;

  // Strides of the activations, in floats.
  const int64_t hidden_stride_;
  const int64_t qkv_stride_;
  const int64_t attention_stride_;
  const int64_t intermediate_stride_;
  const int64_t logits_stride_;
  const int64_t absorbed_stride_;  // of queries that meet latents
  const int64_t latent_stride_;    // of the sums of latents that come out of attention
  const int64_t token_bytes_;      // of the keys, the values or the latent of one token and layer

  HeadSampler head_sampler_;

  // The step in flight.
  std::vector<Chunk> chunks_;
  std::vector<BlockId> block_tables_;
  std::vector<SamplingRequest> samplings_;  // one for each of sampled_rows_; may have more entries
  std::vector<TokenId> histories_;
  std::vector<Row> rows_;
  std::vector<AttentionItem> items_;
  std::vector<int32_t> sampled_rows_;
  std::vector<int32_t> sampled_chunks_;
  bool rotate_in_attention_ = false;
  std::optional<AttentionItem> head_sample_;  // the token that heads are sampled over
  StepResult result_;
  Rotation rotation_;
  absl::Status gate_status_;
  std::atomic<bool> abandoned_{false};
  bool in_flight_ = false;

  FloatBuffer residual_;
  FloatBuffer normalized_;
  FloatBuffer branch_;  // what a norm is applied to before it joins the residual stream
  FloatBuffer qkv_;
  FloatBuffer queries_;  // of latent attention, before and after they are absorbed
  FloatBuffer absorbed_;
  FloatBuffer latents_;
  FloatBuffer attention_;
  FloatBuffer intermediate_;
  FloatBuffer logits_;
  FloatBuffer cosines_;
  FloatBuffer sines_;
  std::vector<ThreadState> thread_states_;

  // Last: its threads use everything above.
  ThreadTeam team_;
};

}  // namespace palimpsest

#endif  // PALIMPSEST_WORKER_COMPUTE_CPU_CPU_RUNNER_H_
