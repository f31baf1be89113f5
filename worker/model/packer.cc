#include "worker/model/packer.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <functional>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "common/fd.h"
#include "common/mapping.h"
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
// What a core allocates at a time.
constexpr Bytes kAllocation = MiB(64);

absl::Status WriteAll(int fd, absl::string_view bytes, absl::string_view what) {
  while (!bytes.empty()) {
    const ssize_t wrote = ::write(fd, bytes.data(), bytes.size());
    if (wrote < 0 && errno == EINTR) continue;
    if (wrote < 0) return ErrnoStatus(absl::StrCat("cannot write ", what));
    bytes.remove_prefix(static_cast<size_t>(wrote));
  }
  return absl::OkStatus();
}

// Gives the file exactly `size` zero bytes and maps them. All pages are allocated here, so that a
// lack of memory is an error and not a signal on first touch, and by all cores, since zeroing them
// on one takes longer than everything else that a packer does (fallocate would).
absl::StatusOr<Mapping> MapImage(int fd, Bytes size) {
  if (::ftruncate(fd, 0) != 0 || ::ftruncate(fd, size.count()) != 0) {
    return ErrnoStatus(absl::StrCat("cannot give the image file ", size.ToString()));
  }
  auto mapping = Mapping::Map(fd, size, MapAccess::kReadWrite);
  if (!mapping.ok()) return mapping;
  std::byte* const data = mapping->data();
  std::vector<absl::Status> ends(static_cast<size_t>(CeilDiv(size, kAllocation)));
  ForEachOnAllCores(static_cast<int64_t>(ends.size()), [&](int64_t i) {
    const Bytes begin = kAllocation * i;
    ends[static_cast<size_t>(i)] =
        AllocatePages(data + begin.count(), std::min(kAllocation, size - begin));
  });
  for (const absl::Status& end : ends) {
    if (!end.ok()) return end;
  }
  return mapping;
}

absl::Span<std::byte> SpanOf(const Mapping& mapping) { return {mapping.data(), mapping.size()}; }

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
  auto mapping = MapImage(request.output_fd, layout.image_bytes());
  if (!mapping.ok()) return mapping.status();
  return BuildImage(*checkpoint, model, layout, SpanOf(*mapping), progress);
}

absl::Status Fill(const PackRequest& request, const ModelConfig& model, const ImageLayout& layout,
                  const ByteProgress& progress) {
  if (!request.dummy_seed.has_value()) {
    return FillFromCheckpoint(request, model, layout, progress);
  }
  auto mapping = MapImage(request.output_fd, layout.image_bytes());
  if (!mapping.ok()) return mapping.status();
  return BuildDummyImage(*request.dummy_seed, model, layout, SpanOf(*mapping), progress);
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
