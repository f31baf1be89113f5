// Collectives between the GPUs of one process: peer_exchange.h for small messages where the GPUs
// can write each other's memory, NCCL for all others.
//
// Memory outside the workspace: NCCL's own, and an inbox of at most 16 MiB on each GPU.
#ifndef PALIMPSEST_WORKER_COMPUTE_CUDA_GPU_COLLECTIVES_H_
#define PALIMPSEST_WORKER_COMPUTE_CUDA_GPU_COLLECTIVES_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "worker/compute/cuda/collective.h"
#include "worker/compute/cuda/nccl.h"
#include "worker/compute/cuda/peer_exchange.h"
#include "worker/compute/cuda/rank_meeting.h"

namespace palimpsest::cuda {

struct GpuCollectivesOptions {
  // The GPU of each rank; at least two, all different.
  std::vector<int> devices;
  // Messages of one rank up to these sizes are exchanged directly; 0: none.
  size_t max_direct_sum_bytes = size_t{8} << 20;
  size_t max_direct_gather_bytes = size_t{256} << 20;
};

class GpuCollectives final : public CollectiveGroup {
 public:
  // Blocks for a second or so. NotFound without NCCL. Abort goes on to `meeting`, which must
  // outlive the object.
  static absl::StatusOr<std::unique_ptr<GpuCollectives>> Create(
      const GpuCollectivesOptions& options, RankMeeting* meeting);
  // No work of the ranks may be running, unless they were aborted.
  ~GpuCollectives() override;

  int ranks() const override { return static_cast<int>(members_.size()); }
  Collective& rank(int rank) override { return *members_[static_cast<size_t>(rank)]; }

  // Whether small messages are exchanged directly.
  bool direct() const { return direct_; }
  int nccl_version() const;

 private:
  class Member final : public Collective {
   public:
    Member(GpuCollectives& group, int rank, NcclLibrary::Comm comm);
    ~Member() override;

    int rank() const override { return exchange_.rank; }
    int ranks() const override { return exchange_.ranks; }
    absl::Status AllReduce(void* data, int64_t count, cudaStream_t stream) override;
    absl::Status AllReduceBeside(void* data, int64_t count, cudaStream_t stream) override;
    absl::Status Join(cudaStream_t stream) override;
    bool JoinsNorm(int32_t rows, int32_t size) const override;
    absl::Status AllReduceNorm(void* data, const SummedNorm& norm, cudaStream_t stream) override;
    absl::Status AllGather(float* parts, float* whole, int32_t rows, int32_t columns, int32_t width,
                           cudaStream_t stream) override;
    void Abort(const absl::Status& status) override { group_.Abort(status); }
    absl::Status status() const override { return group_.meeting_->aborted(); }

   private:
    friend class GpuCollectives;

    // With the rank's GPU current.
    absl::Status MakeStream();

    GpuCollectives& group_;
    NcclCommunicator nccl_;
    PeerExchange exchange_;
    cudaStream_t beside_ = nullptr;
    cudaEvent_t event_ = nullptr;
  };

  GpuCollectives(const GpuCollectivesOptions& options, const NcclLibrary& nccl,
                 RankMeeting* meeting)
      : options_(options), nccl_(nccl), meeting_(meeting) {}

  absl::Status Start();
  absl::Status StartNccl();
  absl::Status OpenInboxes();
  // Has every communicator connect, which a capture does not allow.
  absl::Status FirstCalls(const std::vector<NcclLibrary::Comm>& comms);
  void Abort(const absl::Status& status);

  const GpuCollectivesOptions options_;
  const NcclLibrary& nccl_;
  RankMeeting* const meeting_;
  std::vector<std::unique_ptr<Member>> members_;
  std::vector<void*> allocated_;  // on the GPUs
  uint32_t* aborted_ = nullptr;
  bool direct_ = false;
};

}  // namespace palimpsest::cuda

#endif  // PALIMPSEST_WORKER_COMPUTE_CUDA_GPU_COLLECTIVES_H_
