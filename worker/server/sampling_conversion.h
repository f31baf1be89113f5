// Between the protocol's messages and the core's structs.
#ifndef PALIMPSEST_WORKER_SERVER_SAMPLING_CONVERSION_H_
#define PALIMPSEST_WORKER_SERVER_SAMPLING_CONVERSION_H_

#include "proto/palimpsest/v1/sampling.pb.h"
#include "worker/core/sampling.h"
#include "worker/core/sampling_validation.h"
#include "worker/core/sequence.h"

namespace palimpsest {

SamplingFields ToSamplingFields(const v1::SamplingParams& params);

v1::FinishReason ToProto(FinishReason reason);
void FillUsage(const SequenceUsage& usage, v1::Usage& proto);
void FillLogprob(const SampledToken& token, v1::TokenLogprob& proto);

}  // namespace palimpsest

#endif  // PALIMPSEST_WORKER_SERVER_SAMPLING_CONVERSION_H_
