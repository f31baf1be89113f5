#include "worker/compute/cuda/gpu_collectives.h"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/cuda/status.h"

namespace palimpsest::cuda {
namespace {

// Makes a GPU current while it lives; then the one that was.
class CurrentDevice {
 public:
  explicit CurrentDevice(int device) {
    cudaGetDevice(&before_);
    status_ = CudaStatus(cudaSetDevice(device), absl::StrCat("choose GPU ", device));
  }
  ~CurrentDevice() { cudaSetDevice(before_); }
  const absl::Status& status() const { return status_; }

 private:
  int before_ = 0;
  absl::Status status_;
};

// Whether every GPU can write the memory of every other; then it may.
absl::StatusOr<bool> OpenMemory(const std::vector<int>& devices) {
  const auto each = [&](auto call) {
    for (const int device : devices) {
      const CurrentDevice current(device);
      if (!current.status().ok()) return current.status();
      for (const int peer : devices) {
        if (peer == device) continue;
        if (absl::Status status = call(device, peer); !status.ok()) return status;
      }
    }
    return absl::OkStatus();
  };
  int possible = 1;
  absl::Status status = each([&](int device, int peer) {
    int here = 0;
    const cudaError_t error = cudaDeviceCanAccessPeer(&here, device, peer);
    possible &= here;
    return CudaStatus(error, "whether GPUs can reach each other");
  });
  if (!status.ok()) return status;
  if (possible == 0) return false;
  status = each([](int, int peer) {
    const cudaError_t error = cudaDeviceEnablePeerAccess(peer, 0);
    if (error != cudaErrorPeerAccessAlreadyEnabled) {
      return CudaStatus(error, "let GPUs reach each other");
    }
    cudaGetLastError();  // forget it
    return absl::OkStatus();
  });
  if (!status.ok()) return status;
  return true;
}

}  // namespace

absl::StatusOr<std::unique_ptr<GpuCollectives>> GpuCollectives::Create(
    const GpuCollectivesOptions& options, RankMeeting* meeting) {
  std::vector<int> sorted = options.devices;
  std::sort(sorted.begin(), sorted.end());
  if (sorted.size() < 2 || std::adjacent_find(sorted.begin(), sorted.end()) != sorted.end()) {
    return absl::InvalidArgumentError("a model is shared among two or more different GPUs");
  }
  const absl::StatusOr<const NcclLibrary*> nccl = NcclLibrary::Load();
  if (!nccl.ok()) return nccl.status();
  std::unique_ptr<GpuCollectives> group(new GpuCollectives(options, **nccl, meeting));
  if (absl::Status status = group->Start(); !status.ok()) return status;
  return group;
}

absl::Status GpuCollectives::Start() {
  void* flag = nullptr;
  absl::Status status =
      CudaStatus(cudaHostAlloc(&flag, sizeof(uint32_t), cudaHostAllocPortable), "pinned memory");
  if (!status.ok()) return status;
  aborted_ = static_cast<uint32_t*>(flag);
  *aborted_ = 0;
  status = StartNccl();
  if (!status.ok() || ranks() > kMaxExchangeRanks) return status;
  if (std::max(options_.max_direct_sum_bytes, options_.max_direct_gather_bytes) == 0) return status;
  const absl::StatusOr<bool> reachable = OpenMemory(options_.devices);
  if (!reachable.ok()) return reachable.status();
  if (*reachable) status = OpenInboxes();
  direct_ = *reachable && status.ok();
  return status;
}

absl::Status GpuCollectives::StartNccl() {
  std::vector<NcclLibrary::Comm> comms(options_.devices.size());
  absl::Status status = nccl_.Check(
      nccl_.ncclCommInitAll(comms.data(), static_cast<int>(comms.size()), options_.devices.data()),
      absl::StrCat("connect ", comms.size(), " GPUs"));
  if (!status.ok()) return status;
  for (size_t rank = 0; rank < comms.size(); ++rank) {
    members_.push_back(std::make_unique<Member>(*this, static_cast<int>(rank), comms[rank]));
  }
  return FirstCalls(comms);
}

absl::Status GpuCollectives::FirstCalls(const std::vector<NcclLibrary::Comm>& comms) {
  constexpr size_t kCount = 8;
  std::vector<void*> data(comms.size());
  absl::Status status;
  const auto each = [&](auto call) {
    for (size_t rank = 0; status.ok() && rank < comms.size(); ++rank) {
      const CurrentDevice current(options_.devices[rank]);
      status.Update(current.status());
      if (status.ok()) status = call(rank);
    }
  };
  each([&](size_t rank) {
    const size_t bytes = kCount * sizeof(float) * comms.size();
    return CudaStatus(cudaMalloc(&data[rank], bytes), "memory for the first exchange");
  });
  for (const bool gather : {false, true}) {
    if (!status.ok()) break;
    nccl_.ncclGroupStart();
    each([&](size_t rank) {
      auto* floats = static_cast<float*>(data[rank]);
      return nccl_.Check(gather
                             ? nccl_.ncclAllGather(floats + rank * kCount, floats, kCount,
                                                   NcclLibrary::kFloat32, comms[rank], nullptr)
                             : nccl_.ncclAllReduce(floats, floats, kCount, NcclLibrary::kBfloat16,
                                                   NcclLibrary::kSum, comms[rank], nullptr),
                         "first exchange");
    });
    status.Update(nccl_.Check(nccl_.ncclGroupEnd(), "first exchange"));
  }
  each([&](size_t rank) {
    const cudaError_t error = cudaStreamSynchronize(nullptr);
    absl::Status done =
        CudaStatus(error == cudaSuccess ? PreparePeerExchange() : error, "first exchange");
    return done.ok() ? members_[rank]->MakeStream() : done;
  });
  for (void* memory : data) cudaFree(memory);
  return status;
}

absl::Status GpuCollectives::OpenInboxes() {
  absl::Status status;
  const auto allocate = [&](size_t bytes, int value) {
    void* memory = nullptr;
    status.Update(CudaStatus(cudaMalloc(&memory, bytes), "memory for messages between GPUs"));
    if (status.ok()) status = CudaStatus(cudaMemset(memory, value, bytes), "clear an inbox");
    return memory;
  };
  for (const auto& member : members_) {
    const CurrentDevice current(options_.devices[static_cast<size_t>(member->rank())]);
    status.Update(current.status());
    if (!status.ok()) return status;
    void* inbox = allocate(InboxBytes(ranks()), 0xff);
    void* turns = allocate(TurnBytes(), 0);
    for (void* memory : {inbox, turns}) allocated_.push_back(memory);
    for (const auto& other : members_) other->exchange_.inboxes[member->rank()] = inbox;
    member->exchange_.turns = static_cast<uint32_t*>(turns);
    member->exchange_.aborted = aborted_;
    status.Update(CudaStatus(cudaDeviceSynchronize(), "clear an inbox"));
  }
  return status;
}

GpuCollectives::~GpuCollectives() {
  members_.clear();
  for (void* memory : allocated_) cudaFree(memory);
  if (aborted_ != nullptr) cudaFreeHost(aborted_);
}

int GpuCollectives::nccl_version() const {
  int version = 0;
  nccl_.ncclGetVersion(&version);
  return version;
}

void GpuCollectives::Abort(const absl::Status& status) {
  meeting_->Abort(status);
  *static_cast<volatile uint32_t*>(aborted_) = 1;
  for (const auto& member : members_) member->nccl_.Abort();
}

GpuCollectives::Member::Member(GpuCollectives& group, int rank, NcclLibrary::Comm comm)
    : group_(group), nccl_(group.nccl_, comm) {
  exchange_.rank = rank;
  exchange_.ranks = static_cast<int>(group.options_.devices.size());
}

absl::Status GpuCollectives::Member::AllReduce(void* data, int64_t count, cudaStream_t stream) {
  const size_t bytes = static_cast<size_t>(count) * sizeof(uint16_t);
  const size_t limit = std::min(group_.options_.max_direct_sum_bytes, MaxExchangeBytes(ranks()));
  if (!group_.direct_ || bytes > limit) {
    return nccl_.AllReduce(data, static_cast<size_t>(count), stream);
  }
  return CudaStatus(PeerAllReduce(exchange_, data, bytes, stream), "all-reduce");
}

GpuCollectives::Member::~Member() {
  if (event_ != nullptr) cudaEventDestroy(event_);
  if (beside_ != nullptr) cudaStreamDestroy(beside_);
}

// Of the highest priority: what it runs takes few multiprocessors, and others wait for it.
absl::Status GpuCollectives::Member::MakeStream() {
  int lowest = 0, highest = 0;
  absl::Status status =
      CudaStatus(cudaDeviceGetStreamPriorityRange(&lowest, &highest), "priorities of streams");
  status.Update(
      CudaStatus(cudaStreamCreateWithPriority(&beside_, cudaStreamNonBlocking, highest), "stream"));
  status.Update(CudaStatus(cudaEventCreateWithFlags(&event_, cudaEventDisableTiming), "event"));
  return status;
}

absl::Status GpuCollectives::Member::AllReduceBeside(void* data, int64_t count,
                                                     cudaStream_t stream) {
  absl::Status status = CudaStatus(cudaEventRecord(event_, stream), "event");
  status.Update(CudaStatus(cudaStreamWaitEvent(beside_, event_, 0), "all-reduce"));
  if (!status.ok()) return status;
  return nccl_.AllReduce(data, static_cast<size_t>(count), beside_);
}

absl::Status GpuCollectives::Member::Join(cudaStream_t stream) {
  absl::Status status = CudaStatus(cudaEventRecord(event_, beside_), "event");
  status.Update(CudaStatus(cudaStreamWaitEvent(stream, event_, 0), "all-reduce"));
  return status;
}

bool GpuCollectives::Member::JoinsNorm(int32_t rows, int32_t size) const {
  return group_.direct_ && group_.options_.max_direct_sum_bytes > 0 &&
         TakesNorm(ranks(), rows, size);
}

absl::Status GpuCollectives::Member::AllReduceNorm(void* data, const SummedNorm& norm,
                                                   cudaStream_t stream) {
  return CudaStatus(PeerAllReduceNorm(exchange_, data, norm, stream), "all-reduce and norm");
}

absl::Status GpuCollectives::Member::AllGather(float* parts, float* whole, int32_t rows,
                                               int32_t columns, int32_t width,
                                               cudaStream_t stream) {
  const size_t count = static_cast<size_t>(rows) * static_cast<size_t>(columns);
  const size_t row_bytes = static_cast<size_t>(columns) * sizeof(float);
  // So many that what follows them is aligned to 16 bytes.
  const auto at_once = static_cast<int32_t>(MaxExchangeBytes(ranks()) / row_bytes / 4 * 4);
  if (!group_.direct_ || count * sizeof(float) > group_.options_.max_direct_gather_bytes ||
      at_once == 0) {
    absl::Status status = nccl_.AllGather(parts, count, rank(), stream);
    if (!status.ok()) return status;
    return CudaStatus(Interleave(parts, whole, {rows, columns, width}, stream), "all-gather");
  }
  const float* const own = parts + static_cast<size_t>(rank()) * count;
  cudaError_t error = cudaSuccess;
  for (int32_t row = 0; error == cudaSuccess && row < rows; row += at_once) {
    const SideBySide shape = {std::min(at_once, rows - row), columns, width};
    error = PeerAllGather(exchange_, own + int64_t{row} * columns, whole + int64_t{row} * width,
                          shape, stream);
  }
  return CudaStatus(error, "all-gather");
}

}  // namespace palimpsest::cuda
