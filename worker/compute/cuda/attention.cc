#include "worker/compute/cuda/attention.h"

namespace palimpsest::cuda {
namespace {

constexpr AttentionError kNoKernel = {cudaErrorNotSupported,
                                      "there is no kernel for this head_dim"};

}  // namespace

bool HasDecodeKernel(DecodeKernel kernel, int32_t head_dim, int32_t heads_per_kv_head) {
  if (head_dim != 64 && head_dim != 128 && (head_dim != 256 || kernel != DecodeKernel::kMasked)) {
    return false;
  }
  if (kernel != DecodeKernel::kCudaCores) return heads_per_kv_head <= 16;
  switch (heads_per_kv_head) {
    case 1:
    case 2:
    case 3:
    case 4:
    case 6:
    case 8:
    case 16:
      return true;
    default:
      return false;
  }
}

AttentionError DecodeAttention(DecodeKernel kernel, const Queries& queries, const PagedKv& kv,
                               const DecodeWork& work, bool overlap_launch, cudaStream_t stream) {
  using Function =
      AttentionError(const Queries&, const PagedKv&, const DecodeWork&, bool, cudaStream_t);
  Function* function = nullptr;
  switch (kernel) {
    case DecodeKernel::kCudaCores:
      if (kv.head_dim == 64) function = internal::Decode<64>;
      if (kv.head_dim == 128) function = internal::Decode<128>;
      break;
    case DecodeKernel::kTensorCores:
      if (kv.head_dim == 64) function = internal::DecodeFa2<64>;
      if (kv.head_dim == 128) function = internal::DecodeFa2<128>;
      break;
    case DecodeKernel::kMasked:
      if (kv.head_dim == 64) function = internal::DecodeMasked<64>;
      if (kv.head_dim == 128) function = internal::DecodeMasked<128>;
      if (kv.head_dim == 256) function = internal::DecodeMasked<256>;
      break;
  }
  if (kv.e4m3) {
    function = nullptr;
    if (kernel == DecodeKernel::kMasked && queries.soft_cap == 0) {
      if (kv.head_dim == 64) function = internal::DecodeFp8<64>;
      if (kv.head_dim == 128) function = internal::DecodeFp8<128>;
    }
  }
  if (function == nullptr) return kNoKernel;
  return function(queries, kv, work, overlap_launch, stream);
}

AttentionError PlanPrefill(const PrefillShape& shape, bool hopper, const PrefillBuffers& buffers,
                           PrefillPlan& plan, cudaStream_t stream) {
  switch (shape.head_dim) {
    case 64:
      return hopper ? internal::PlanFa3<64>(shape, buffers, plan, stream)
                    : internal::PlanFa2<64>(shape, buffers, plan, stream);
    case 128:
      return hopper ? internal::PlanFa3<128>(shape, buffers, plan, stream)
                    : internal::PlanFa2<128>(shape, buffers, plan, stream);
    case 256:
      return hopper ? kNoKernel : internal::PlanFa2<256>(shape, buffers, plan, stream);
    default:
      return kNoKernel;
  }
}

AttentionError RunPrefill(const PrefillPlan& plan, const PrefillShape& shape,
                          const Queries& queries, const PagedKv& kv, int32_t* row_indptr,
                          const PrefillBuffers& buffers, cudaStream_t stream) {
  using Function = AttentionError(const PrefillPlan&, const PrefillShape&, const Queries&,
                                  const PagedKv&, int32_t*, const PrefillBuffers&, cudaStream_t);
  const bool capped = queries.soft_cap > 0;
  Function* function = nullptr;
  if (kv.e4m3) {
    if (shape.head_dim == 64 && !capped && !plan.hopper) function = internal::RunFp8<64>;
    if (shape.head_dim == 128 && !capped && !plan.hopper) function = internal::RunFp8<128>;
  } else if (shape.head_dim == 64 && !capped) {
    function = plan.hopper ? internal::RunFa3<64> : internal::RunFa2<64>;
  } else if (shape.head_dim == 128 && !capped) {
    function = plan.hopper ? internal::RunFa3<128> : internal::RunFa2<128>;
  } else if (shape.head_dim == 128 && !plan.hopper) {
    function = internal::RunCapped<128>;
  } else if (shape.head_dim == 256 && !plan.hopper) {
    function = internal::RunCapped<256>;
  }
  if (function == nullptr) return kNoKernel;
  return function(plan, shape, queries, kv, row_indptr, buffers, stream);
}

}  // namespace palimpsest::cuda
