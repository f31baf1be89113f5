// The gate of a runner whose steps also wait for KV that comes back from host memory: layer by
// layer, as they wait for parameters.
#ifndef PALIMPSEST_WORKER_CORE_SWAP_GATE_H_
#define PALIMPSEST_WORKER_CORE_SWAP_GATE_H_

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "worker/core/model_runner.h"
#include "worker/core/swap_copier.h"

namespace palimpsest {

class SwapGate final : public ParameterGate {
 public:
  // Stages first_layer .. first_layer + layers - 1 are the model's layers. Both must outlive it.
  SwapGate(ParameterGate* parameters, SwapCopier* swap, int first_layer, int layers)
      : parameters_(parameters), swap_(swap), first_layer_(first_layer), layers_(layers) {}

  absl::Status AwaitStage(int stage) override {
    const absl::Status status = parameters_->AwaitStage(stage);
    return status.ok() && IsLayer(stage) ? swap_->AwaitLayer(stage - first_layer_) : status;
  }
  absl::Status StageEvents(int stage, absl::Span<void*> events) override {
    const absl::Status status = parameters_->StageEvents(stage, events);
    return status.ok() && IsLayer(stage) ? swap_->LayerEvents(stage - first_layer_, events)
                                         : status;
  }
  absl::Status CheckPassed() override { return parameters_->CheckPassed(); }
  void ReleaseStage(int stage) override { parameters_->ReleaseStage(stage); }

 private:
  bool IsLayer(int stage) const { return stage >= first_layer_ && stage < first_layer_ + layers_; }

  ParameterGate* const parameters_;
  SwapCopier* const swap_;
  const int first_layer_;
  const int layers_;
};

}  // namespace palimpsest

#endif  // PALIMPSEST_WORKER_CORE_SWAP_GATE_H_
