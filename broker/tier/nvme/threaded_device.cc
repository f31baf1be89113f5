// Blocking calls on a few threads.
#include <unistd.h>

#include <cerrno>
#include <deque>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "broker/tier/nvme/file_device.h"
#include "common/mutex.h"

namespace palimpsest {
namespace {

absl::Status Transfer(int fd, const IoRequest& request) {
  const bool read = request.kind == IoRequest::Kind::kRead;
  size_t at = 0;
  while (at < request.data.size()) {
    std::byte* const data = request.data.data() + at;
    const size_t size = request.data.size() - at;
    const off_t offset = request.offset.count() + static_cast<off_t>(at);
    const ssize_t n = read ? pread(fd, data, size, offset) : pwrite(fd, data, size, offset);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) return ErrnoStatus(read ? "pread" : "pwrite");
    if (n == 0) return absl::DataLossError("the file ends early");
    at += static_cast<size_t>(n);
  }
  return absl::OkStatus();
}

class ThreadedDevice : public BlockDevice {
 public:
  ThreadedDevice(UniqueFd file, Bytes size, int threads) : file_(std::move(file)), size_(size) {
    threads_.reserve(static_cast<size_t>(threads));
    for (int i = 0; i < threads; ++i) threads_.emplace_back([this] { Run(); });
  }
  ~ThreadedDevice() override {
    {
      MutexLock lock(&mutex_);
      stopping_ = true;
      changed_.SignalAll();
    }
    for (std::thread& thread : threads_) thread.join();
  }

  Bytes size() const override { return size_; }

  void Submit(IoRequest request) override {
    MutexLock lock(&mutex_);
    queue_.push_back(std::move(request));
    changed_.Signal();
  }

 private:
  bool Next(IoRequest& request) {
    MutexLock lock(&mutex_);
    while (queue_.empty() && !stopping_) changed_.Wait(&mutex_);
    if (queue_.empty()) return false;
    request = std::move(queue_.front());
    queue_.pop_front();
    return true;
  }

  void Run() {
    IoRequest request;
    while (Next(request)) {
      absl::Status status;
      if (request.kind != IoRequest::Kind::kFlush) {
        status = Transfer(file_.get(), request);
      } else if (fdatasync(file_.get()) != 0) {
        status = ErrnoStatus("fdatasync");
      }
      request.done(std::move(status));
      request.done = nullptr;
    }
  }

  const UniqueFd file_;
  const Bytes size_;
  Mutex mutex_;
  CondVar changed_;
  std::deque<IoRequest> queue_ ABSL_GUARDED_BY(mutex_);
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  std::vector<std::thread> threads_;
};

}  // namespace

std::unique_ptr<BlockDevice> MakeThreadedDevice(UniqueFd file, Bytes size, int threads) {
  return std::make_unique<ThreadedDevice>(std::move(file), size, threads);
}

}  // namespace palimpsest
