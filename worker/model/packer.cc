#include "worker/model/packer.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstddef>
#include <functional>
#include <utility>

#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "common/fd.h"
#include "worker/model/image_builder.h"
#include "worker/model/image_layout.h"
#include "worker/model/manifest.h"
#include "worker/model/model_config.h"
#include "worker/model/parallel.h"
#include "worker/model/safetensors.h"
#include "worker/model/tensor_parallel.h"

namespace palimpsest {
namespace {

constexpr int64_t kProgressSteps = 200;
constexpr size_t kPopulateStep = size_t{64} << 20;

absl::Status WriteAll(int fd, absl::string_view bytes, absl::string_view what) {
  while (!bytes.empty()) {
    const ssize_t wrote = ::write(fd, bytes.data(), bytes.size());
    if (wrote < 0 && errno == EINTR) continue;
    if (wrote < 0) return ErrnoStatus(absl::StrCat("cannot write ", what));
    bytes.remove_prefix(static_cast<size_t>(wrote));
  }
  return absl::OkStatus();
}

class SharedMapping {
 public:
  // Gives the file exactly `size` zero bytes and maps them. The pages are allocated here, so that a
  // lack of memory is an error and not a signal on first touch, and by all cores, since zeroing
  // them on one takes longer than everything else that a packer does (fallocate would).
  static absl::StatusOr<SharedMapping> Create(int fd, Bytes size) {
    if (::ftruncate(fd, 0) != 0 || ::ftruncate(fd, size.count()) != 0) {
      return ErrnoStatus(absl::StrCat("cannot give the image file ", size.ToString()));
    }
    void* data = ::mmap(nullptr, static_cast<size_t>(size.count()), PROT_READ | PROT_WRITE,
                        MAP_SHARED, fd, 0);
    if (data == MAP_FAILED) return ErrnoStatus("cannot map the image file");
    SharedMapping mapping(static_cast<std::byte*>(data), static_cast<size_t>(size.count()));
    if (absl::Status status = mapping.Populate(); !status.ok()) return status;
    return mapping;
  }

  SharedMapping(SharedMapping&& other) noexcept
      : data_(std::exchange(other.data_, nullptr)), size_(other.size_) {}
  SharedMapping& operator=(SharedMapping&&) = delete;
  ~SharedMapping() {
    if (data_ != nullptr) ::munmap(data_, size_);
  }

  absl::Span<std::byte> span() const { return {data_, size_}; }

 private:
  SharedMapping(std::byte* data, size_t size) : data_(data), size_(size) {}

  absl::Status Populate() {
    std::atomic<int> error = 0;
    ForEachOnAllCores(static_cast<int64_t>((size_ + kPopulateStep - 1) / kPopulateStep),
                      [&](int64_t i) {
                        const size_t begin = static_cast<size_t>(i) * kPopulateStep;
                        const size_t length = std::min(kPopulateStep, size_ - begin);
                        while (::madvise(data_ + begin, length, MADV_POPULATE_WRITE) != 0) {
                          if (errno == EINTR || errno == EAGAIN) continue;
                          error = errno;
                          return;
                        }
                      });
    errno = error;
    if (error == 0) return absl::OkStatus();
    return ErrnoStatus(
        absl::StrCat("cannot allocate ", static_cast<int64_t>(size_), " bytes for the image"));
  }

  std::byte* data_;
  size_t size_;
};

// Writes a line per half percent. The reader may be gone; progress is not worth failing for.
ByteProgress LinesTo(int fd) {
  if (fd < 0) return nullptr;
  return [fd, next = Bytes(0)](Bytes done, Bytes total) mutable {
    if (done < next && done < total) return;
    next = done + total / kProgressSteps;
    WriteAll(fd, absl::StrCat("pack ", done.count(), " ", total.count(), "\n"), "progress")
        .IgnoreError();
  };
}

absl::Status FillFromCheckpoint(const PackRequest& request, const ModelConfig& model,
                                const ImageLayout& layout, const ByteProgress& progress) {
  auto checkpoint = Checkpoint::Open(request.model_folder);
  if (!checkpoint.ok()) return checkpoint.status();
  // Before memory is taken.
  if (absl::Status status = CheckTensors(*checkpoint, model, layout); !status.ok()) return status;
  auto mapping = SharedMapping::Create(request.output_fd, layout.image_bytes());
  if (!mapping.ok()) return mapping.status();
  return BuildImage(*checkpoint, model, layout, mapping->span(), progress);
}

absl::Status Fill(const PackRequest& request, const ModelConfig& model, const ImageLayout& layout,
                  const ByteProgress& progress) {
  if (!request.dummy_seed.has_value()) {
    return FillFromCheckpoint(request, model, layout, progress);
  }
  auto mapping = SharedMapping::Create(request.output_fd, layout.image_bytes());
  if (!mapping.ok()) return mapping.status();
  return BuildDummyImage(*request.dummy_seed, model, layout, mapping->span(), progress);
}

}  // namespace

absl::Status Pack(const PackRequest& request) {
  auto model = ReadModelConfig(request.model_folder);
  if (!model.ok()) return model.status();
  model->kv_dtype = request.kv_dtype;
  auto rank = RankConfig(*model, request.ranks);
  if (!rank.ok()) return rank.status();
  auto layout = LayOutImage(*rank, request.slab_bytes, request.format);
  if (!layout.ok()) return layout.status();
  auto manifest =
      MakeManifest(*rank, *layout, request.kv_block_tokens, request.max_sequence_tokens);
  if (!manifest.ok()) return manifest.status();
  const absl::Status status = Fill(request, *model, *layout, LinesTo(request.progress_fd));
  if (!status.ok()) {
    return absl::Status(status.code(), absl::StrCat(request.model_folder, ": ", status.message()));
  }
  return WriteAll(request.manifest_fd, manifest->SerializeAsString(), "the manifest");
}

}  // namespace palimpsest
