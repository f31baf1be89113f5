#include "worker/compute/cuda/attention.h"

namespace palimpsest::cuda {
namespace {

constexpr AttentionError kNoKernel = {cudaErrorNotSupported,
                                      "there are kernels for head_dim 64 and 128 only"};

}  // namespace

bool HasDecodeKernel(DecodeKernel kernel, int32_t head_dim, int32_t heads_per_kv_head) {
  if (head_dim != 64 && head_dim != 128) return false;
  if (kernel == DecodeKernel::kTensorCores) return heads_per_kv_head <= 16;
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
  const bool tensor_cores = kernel == DecodeKernel::kTensorCores;
  switch (kv.head_dim) {
    case 64:
      return tensor_cores ? internal::DecodeFa2<64>(queries, kv, work, overlap_launch, stream)
                          : internal::Decode<64>(queries, kv, work, overlap_launch, stream);
    case 128:
      return tensor_cores ? internal::DecodeFa2<128>(queries, kv, work, overlap_launch, stream)
                          : internal::Decode<128>(queries, kv, work, overlap_launch, stream);
    default:
      return kNoKernel;
  }
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
    default:
      return kNoKernel;
  }
}

AttentionError RunPrefill(const PrefillPlan& plan, const PrefillShape& shape,
                          const Queries& queries, const PagedKv& kv, int32_t* row_indptr,
                          const PrefillBuffers& buffers, cudaStream_t stream) {
  switch (shape.head_dim) {
    case 64:
      return plan.hopper
                 ? internal::RunFa3<64>(plan, shape, queries, kv, row_indptr, buffers, stream)
                 : internal::RunFa2<64>(plan, shape, queries, kv, row_indptr, buffers, stream);
    case 128:
      return plan.hopper
                 ? internal::RunFa3<128>(plan, shape, queries, kv, row_indptr, buffers, stream)
                 : internal::RunFa2<128>(plan, shape, queries, kv, row_indptr, buffers, stream);
    default:
      return kNoKernel;
  }
}

}  // namespace palimpsest::cuda
