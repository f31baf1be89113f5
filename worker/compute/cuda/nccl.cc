#include "worker/compute/cuda/nccl.h"

#include <dlfcn.h>

#include "absl/strings/str_cat.h"

namespace palimpsest::cuda {
namespace {

constexpr char kLibrary[] = "libnccl.so.2";

absl::StatusOr<NcclLibrary> Open() {
  // Never closed: NCCL has threads of its own.
  void* const library = dlopen(kLibrary, RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    return absl::NotFoundError(
        absl::StrCat("a model on several GPUs needs NCCL: ", dlerror(),
                     "; install libnccl2, or name its folder in LD_LIBRARY_PATH"));
  }
  NcclLibrary table;
#define PALIMPSEST_RESOLVE(name)                                              \
  table.name = reinterpret_cast<decltype(table.name)>(dlsym(library, #name)); \
  if (table.name == nullptr) return absl::NotFoundError("libnccl.so.2 lacks " #name);
  PALIMPSEST_RESOLVE(ncclGetVersion)
  PALIMPSEST_RESOLVE(ncclGetErrorString)
  PALIMPSEST_RESOLVE(ncclCommInitAll)
  PALIMPSEST_RESOLVE(ncclCommDestroy)
  PALIMPSEST_RESOLVE(ncclCommAbort)
  PALIMPSEST_RESOLVE(ncclGroupStart)
  PALIMPSEST_RESOLVE(ncclGroupEnd)
  PALIMPSEST_RESOLVE(ncclAllReduce)
  PALIMPSEST_RESOLVE(ncclAllGather)
#undef PALIMPSEST_RESOLVE
  return table;
}

}  // namespace

absl::StatusOr<const NcclLibrary*> NcclLibrary::Load() {
  static const absl::StatusOr<NcclLibrary>* const library = new absl::StatusOr<NcclLibrary>(Open());
  if (!library->ok()) return library->status();
  return &**library;
}

absl::Status NcclLibrary::Check(int result, absl::string_view what) const {
  if (result == 0) return absl::OkStatus();
  return absl::InternalError(absl::StrCat(what, ": NCCL error ", result, ", ",
                                          ncclGetErrorString(result),
                                          "; NCCL_DEBUG=WARN makes it say more"));
}

NcclCommunicator::NcclCommunicator(const NcclLibrary& library, NcclLibrary::Comm comm)
    : library_(library), comm_(comm) {}

NcclCommunicator::~NcclCommunicator() {
  if (state_ == State::kIdle) library_.ncclCommDestroy(comm_);
}

absl::Status NcclCommunicator::Enter() {
  State idle = State::kIdle;
  if (state_.compare_exchange_strong(idle, State::kBusy)) return absl::OkStatus();
  return absl::AbortedError("the communicator was aborted");
}

absl::Status NcclCommunicator::Leave(int result, absl::string_view what) {
  State busy = State::kBusy;
  if (state_.compare_exchange_strong(busy, State::kIdle)) return library_.Check(result, what);
  library_.ncclCommAbort(comm_);
  state_ = State::kGone;
  return absl::AbortedError(absl::StrCat(what, ": the communicator was aborted"));
}

absl::Status NcclCommunicator::AllReduce(void* data, size_t count, cudaStream_t stream) {
  if (absl::Status status = Enter(); !status.ok()) return status;
  return Leave(library_.ncclAllReduce(data, data, count, NcclLibrary::kBfloat16, NcclLibrary::kSum,
                                      comm_, stream),
               "all-reduce");
}

absl::Status NcclCommunicator::AllGather(float* data, size_t count, int rank, cudaStream_t stream) {
  if (absl::Status status = Enter(); !status.ok()) return status;
  return Leave(library_.ncclAllGather(data + static_cast<size_t>(rank) * count, data, count,
                                      NcclLibrary::kFloat32, comm_, stream),
               "all-gather");
}

void NcclCommunicator::Abort() {
  while (true) {
    State seen = state_;
    if (seen == State::kIdle && state_.compare_exchange_strong(seen, State::kGone)) {
      library_.ncclCommAbort(comm_);
      return;
    }
    // Its thread is in a call and ends the communicator on the way out.
    if (seen == State::kBusy && state_.compare_exchange_strong(seen, State::kBusyAborted)) return;
    if (seen == State::kBusyAborted || seen == State::kGone) return;
  }
}

}  // namespace palimpsest::cuda
