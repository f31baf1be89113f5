// What every FlashInfer unit needs: its exceptions become AttentionErrors.
#ifndef PALIMPSEST_WORKER_COMPUTE_CUDA_ATTENTION_UNIT_CUH_
#define PALIMPSEST_WORKER_COMPUTE_CUDA_ATTENTION_UNIT_CUH_

#include <cstring>
#include <exception>
#include <string>
#include <type_traits>

#include "worker/compute/cuda/attention.h"

namespace palimpsest::cuda::internal {

template <typename Call>
AttentionError Guard(Call call) {
  static thread_local std::string message;
  try {
    return {call(), nullptr};
  } catch (const std::exception& error) {
    message = error.what();
    return {cudaErrorInvalidValue, message.c_str()};
  }
}

template <typename Info>
void StorePlan(const Info& info, bool hopper, PrefillPlan& plan) {
  static_assert(sizeof(Info) <= PrefillPlan::kBytes && std::is_trivially_copyable_v<Info>);
  std::memcpy(plan.bytes, &info, sizeof(info));
  plan.hopper = hopper;
}

template <typename Info>
Info LoadPlan(const PrefillPlan& plan) {
  Info info;
  std::memcpy(&info, plan.bytes, sizeof(info));
  return info;
}

}  // namespace palimpsest::cuda::internal

#endif  // PALIMPSEST_WORKER_COMPUTE_CUDA_ATTENTION_UNIT_CUH_
