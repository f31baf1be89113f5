// io_uring, driven by one thread that owns the ring. Others hand it requests and wake it by an
// eventfd, which the ring itself reads.
#include <liburing.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <cerrno>
#include <deque>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "broker/tier/nvme/file_device.h"
#include "common/log.h"
#include "common/mutex.h"

namespace palimpsest {
namespace {

constexpr int kMostRetries = 16;

class UringDevice : public BlockDevice {
 public:
  // `ring` is set up, and belongs to the device.
  UringDevice(UniqueFd file, UniqueFd wake, io_uring ring, Bytes size, int depth)
      : file_(std::move(file)), wake_(std::move(wake)), ring_(ring), size_(size), depth_(depth) {
    thread_ = std::thread([this] { Run(); });
  }
  ~UringDevice() override {
    {
      MutexLock lock(&mutex_);
      stopping_ = true;
    }
    Wake();
    thread_.join();
    io_uring_queue_exit(&ring_);
  }

  Bytes size() const override { return size_; }

  void Submit(IoRequest request) override {
    bool first = false;
    {
      MutexLock lock(&mutex_);
      first = inbox_.empty();
      inbox_.push_back({std::move(request)});
    }
    // The thread looks into the inbox before it waits.
    if (first && std::this_thread::get_id() != thread_.get_id()) Wake();
  }

 private:
  struct Operation {
    IoRequest request;
    size_t transferred = 0;
    int retries = 0;
  };

  void Wake() {
    const uint64_t one = 1;
    while (write(wake_.get(), &one, sizeof one) < 0 && errno == EINTR) {
    }
  }

  // False when everything has completed and nothing will come.
  bool TakeInbox() {
    MutexLock lock(&mutex_);
    for (Operation& operation : inbox_) {
      waiting_.push_back(std::make_unique<Operation>(std::move(operation)));
    }
    inbox_.clear();
    return !(stopping_ && waiting_.empty() && in_flight_ == 0);
  }

  void ArmWake() {
    io_uring_sqe* const sqe = io_uring_get_sqe(&ring_);
    io_uring_prep_read(sqe, wake_.get(), &woken_, sizeof woken_, 0);
    io_uring_sqe_set_data(sqe, nullptr);
    armed_ = true;
  }

  void Prepare(std::unique_ptr<Operation> operation) {
    io_uring_sqe* const sqe = io_uring_get_sqe(&ring_);
    const IoRequest& request = operation->request;
    std::byte* const data = request.data.data() + operation->transferred;
    const auto size = static_cast<unsigned>(request.data.size() - operation->transferred);
    const uint64_t offset = request.offset.count() + operation->transferred;
    switch (request.kind) {
      case IoRequest::Kind::kRead:
        io_uring_prep_read(sqe, file_.get(), data, size, offset);
        break;
      case IoRequest::Kind::kWrite:
        io_uring_prep_write(sqe, file_.get(), data, size, offset);
        break;
      case IoRequest::Kind::kFlush:
        io_uring_prep_fsync(sqe, file_.get(), IORING_FSYNC_DATASYNC);
        break;
    }
    io_uring_sqe_set_data(sqe, operation.release());
    ++in_flight_;
  }

  void Run() {
    while (TakeInbox()) {
      if (!armed_) ArmWake();
      while (!waiting_.empty() && in_flight_ < depth_) {
        Prepare(std::move(waiting_.front()));
        waiting_.pop_front();
      }
      const int result = io_uring_submit_and_wait(&ring_, 1);
      if (result < 0 && result != -EINTR) {
        // Short of memory, as a rule. What was prepared stays in the ring.
        if (!std::exchange(refusal_logged_, true)) {
          Log(LogLevel::kWarning, "io_uring takes no requests",
              {{"reason", ErrnoStatus("io_uring_enter", -result)}});
        }
        absl::SleepFor(absl::Milliseconds(10));
      }
      Reap();
    }
    // The ring's read of the eventfd must not outlive its buffer.
    if (!armed_) return;
    Wake();
    io_uring_cqe* cqe = nullptr;
    while (io_uring_wait_cqe(&ring_, &cqe) == -EINTR) {
    }
  }

  void Reap() {
    io_uring_cqe* cqe = nullptr;
    while (io_uring_peek_cqe(&ring_, &cqe) == 0) {
      std::unique_ptr<Operation> operation(static_cast<Operation*>(io_uring_cqe_get_data(cqe)));
      const int result = cqe->res;
      io_uring_cqe_seen(&ring_, cqe);
      if (operation == nullptr) {
        armed_ = false;
      } else {
        --in_flight_;
        Finish(std::move(operation), result);
      }
    }
  }

  void Finish(std::unique_ptr<Operation> operation, int result) {
    IoRequest& request = operation->request;
    if ((result == -EINTR || result == -EAGAIN) && ++operation->retries <= kMostRetries) {
      waiting_.push_front(std::move(operation));
      return;
    }
    if (result < 0) return request.done(ErrnoStatus("the device", -result));
    operation->transferred += static_cast<size_t>(result);
    if (operation->transferred >= request.data.size()) return request.done(absl::OkStatus());
    if (result == 0) return request.done(absl::DataLossError("the file ends early"));
    waiting_.push_front(std::move(operation));
  }

  const UniqueFd file_;
  const UniqueFd wake_;
  io_uring ring_;
  const Bytes size_;
  const int depth_;

  Mutex mutex_;
  std::vector<Operation> inbox_ ABSL_GUARDED_BY(mutex_);
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;

  // The thread's own.
  std::deque<std::unique_ptr<Operation>> waiting_;
  int in_flight_ = 0;
  bool armed_ = false;
  bool refusal_logged_ = false;
  uint64_t woken_ = 0;

  std::thread thread_;
};

// Old kernels have io_uring without these.
bool HasOperations(io_uring& ring) {
  io_uring_probe* const probe = io_uring_get_probe_ring(&ring);
  if (probe == nullptr) return false;
  const bool all = io_uring_opcode_supported(probe, IORING_OP_READ) != 0 &&
                   io_uring_opcode_supported(probe, IORING_OP_WRITE) != 0 &&
                   io_uring_opcode_supported(probe, IORING_OP_FSYNC) != 0;
  io_uring_free_probe(probe);
  return all;
}

}  // namespace

absl::StatusOr<std::unique_ptr<BlockDevice>> MakeUringDevice(UniqueFd& file, Bytes size,
                                                             int depth) {
  UniqueFd wake(eventfd(0, EFD_CLOEXEC));
  if (!wake.valid()) return ErrnoStatus("cannot make an eventfd");
  io_uring ring = {};
  const int result = io_uring_queue_init(static_cast<unsigned>(depth) + 1, &ring, 0);
  if (result < 0) return ErrnoStatus("io_uring_setup", -result);
  if (!HasOperations(ring)) {
    io_uring_queue_exit(&ring);
    return absl::UnimplementedError("the kernel's io_uring is too old");
  }
  return std::make_unique<UringDevice>(std::move(file), std::move(wake), ring, size, depth);
}

}  // namespace palimpsest
