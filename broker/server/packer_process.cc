#include "broker/server/packer_process.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <utility>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "common/memory_file.h"
#include "common/monotonic_time.h"
#include "common/process.h"
#include "worker/model/manifest.h"

namespace palimpsest {
namespace {

constexpr size_t kMaxManifestBytes = 16 << 20;
constexpr size_t kMaxProgressLine = 128;
constexpr size_t kMaxLastWords = 2048;
constexpr absl::Duration kLookAround = absl::Milliseconds(100);
constexpr int kSeals = F_SEAL_WRITE | F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;

struct Pipe {
  UniqueFd read;
  UniqueFd write;
};

absl::StatusOr<Pipe> MakePipe() {
  int ends[2];
  if (pipe2(ends, O_CLOEXEC) != 0) return ErrnoStatus("pipe2");
  Pipe pipe{UniqueFd(ends[0]), UniqueFd(ends[1])};
  if (fcntl(pipe.read.get(), F_SETFL, O_NONBLOCK) != 0) return ErrnoStatus("fcntl");
  return pipe;
}

// What a packer says on its three pipes.
class Conversation {
 public:
  explicit Conversation(const ImageProgressFn& progress) : progress_(progress) {}

  // Reads what has come on pipe `index` (manifest, progress, output); false at its end.
  bool Read(size_t index, int fd) {
    std::array<char, 4096> chunk;
    const ssize_t n = read(fd, chunk.data(), chunk.size());
    if (n < 0) return errno == EAGAIN || errno == EINTR;
    if (n == 0) return false;
    const absl::string_view text(chunk.data(), static_cast<size_t>(n));
    if (index == 0) {
      if (manifest.size() <= kMaxManifestBytes) manifest.append(text.data(), text.size());
    } else if (index == 1) {
      Progress(text);
    } else {
      last_words.append(text.data(), text.size());
      if (last_words.size() > kMaxLastWords) {
        last_words.erase(0, last_words.size() - kMaxLastWords);
      }
    }
    return true;
  }

  std::string manifest;
  std::string last_words;

 private:
  void Progress(absl::string_view text) {
    for (const char c : text) {
      if (c != '\n') {
        if (line_.size() < kMaxProgressLine) line_.push_back(c);
        continue;
      }
      const std::vector<absl::string_view> words = absl::StrSplit(line_, ' ');
      int64_t done = 0;
      int64_t total = 0;
      if (progress_ && words.size() == 3 && words[0] == "pack" &&
          absl::SimpleAtoi(words[1], &done) && absl::SimpleAtoi(words[2], &total) && done >= 0 &&
          done <= total) {
        progress_(Bytes(done), Bytes(total));
      }
      line_.clear();
    }
  }

  const ImageProgressFn& progress_;
  std::string line_;
};

// Listens until all pipes are closed and the packer has exited.
absl::Status Listen(ChildProcess& packer, std::array<UniqueFd, 3>& pipes, const PackerRun& run,
                    const std::function<bool()>& cancelled, Conversation& said) {
  const absl::Time deadline = MonotonicNow() + run.deadline;
  while (pipes[0].valid() || pipes[1].valid() || pipes[2].valid()) {
    if (MonotonicNow() >= deadline) {
      return absl::DeadlineExceededError(
          absl::StrCat("packing took longer than ", absl::FormatDuration(run.deadline)));
    }
    if (cancelled()) return absl::CancelledError("packing was cancelled");
    // poll skips entries with a negative descriptor.
    std::array<pollfd, 3> entries;
    for (size_t i = 0; i < pipes.size(); ++i) entries[i] = {pipes[i].get(), POLLIN, 0};
    if (poll(entries.data(), entries.size(),
             static_cast<int>(absl::ToInt64Milliseconds(kLookAround))) < 0 &&
        errno != EINTR) {
      return ErrnoStatus("poll");
    }
    for (size_t i = 0; i < pipes.size(); ++i) {
      if (entries[i].revents != 0 && !said.Read(i, pipes[i].get())) pipes[i].Reset();
    }
  }
  const absl::Status exited = packer.Wait(std::max(deadline - MonotonicNow(), absl::Seconds(1)));
  if (exited.ok()) return exited;
  return absl::AbortedError(absl::StrCat("the packer ", exited.message(),
                                         said.last_words.empty() ? "" : ": ",
                                         absl::StripSuffix(said.last_words, "\n")));
}

absl::Status CheckMade(const Conversation& said, const v1::ImageManifest& expected) {
  v1::ImageManifest manifest;
  if (said.manifest.size() > kMaxManifestBytes || !manifest.ParseFromString(said.manifest)) {
    return absl::DataLossError("the packer's manifest is none");
  }
  if (manifest.SerializeAsString() != expected.SerializeAsString()) {
    return absl::DataLossError(absl::StrCat(
        "the packer's manifest differs from the broker's (", manifest.image_bytes(), " bytes in ",
        manifest.stages_size(), " stages, expected ", expected.image_bytes(), " in ",
        expected.stages_size(), "): did the model change, or is the packer of another release?"));
  }
  return absl::OkStatus();
}

absl::StatusOr<UniqueFd> Seal(UniqueFd memory, Bytes size) {
  if (absl::Status status = SealMemory(memory.get(), kSeals); !status.ok()) return status;
  const std::string path = absl::StrCat("/proc/self/fd/", memory.get());
  UniqueFd reader(open(path.c_str(), O_RDONLY | O_CLOEXEC));
  if (!reader.valid()) return ErrnoStatus(absl::StrCat("reopen ", path, " for reading"));
  if (absl::Status status = CheckSealed(reader.get(), size); !status.ok()) return status;
  return reader;
}

}  // namespace

absl::StatusOr<UniqueFd> RunPacker(const PackerRun& run, const ImageProgressFn& progress,
                                   const std::function<bool()>& cancelled) {
  UniqueFd memory(memfd_create("palimpsest-image", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (!memory.valid()) return ErrnoStatus("memfd_create");
  std::array<UniqueFd, 3> readers;
  std::array<UniqueFd, 3> writers;
  for (size_t i = 0; i < readers.size(); ++i) {
    absl::StatusOr<Pipe> pipe = MakePipe();
    if (!pipe.ok()) return pipe.status();
    readers[i] = std::move(pipe->read);
    writers[i] = std::move(pipe->write);
  }
  SpawnOptions options;
  options.argv = {run.packer,
                  "--model",
                  run.model_folder,
                  "--slab-bytes",
                  absl::StrCat(run.expected.slab_bytes()),
                  "--kv-block-tokens",
                  absl::StrCat(run.expected.kv_block_tokens()),
                  "--max-sequence-tokens",
                  absl::StrCat(run.expected.max_sequence_tokens()),
                  "--format",
                  run.expected.weight_format(),
                  "--ranks",
                  absl::StrCat(run.expected.ranks()),
                  "--kv-dtype",
                  run.expected.kv_dtype(),
                  "--output-fd",
                  "3",
                  "--manifest-fd",
                  "4",
                  "--progress-fd",
                  "5"};
  if (run.dummy_seed) options.argv.push_back(absl::StrCat("--dummy-seed=", *run.dummy_seed));
  options.descriptors = {memory.get(), writers[0].get(), writers[1].get()};
  options.output = writers[2].get();
  absl::StatusOr<ChildProcess> packer = ChildProcess::Spawn(options);
  if (!packer.ok()) {
    return absl::Status(packer.status().code(), absl::StrCat("cannot start the packer ", run.packer,
                                                             ": ", packer.status().message()));
  }
  for (UniqueFd& writer : writers) writer.Reset();
  Conversation said(progress);
  absl::Status status = Listen(*packer, readers, run, cancelled, said);
  if (status.ok()) status = CheckMade(said, run.expected);
  if (!status.ok()) return status;
  return Seal(std::move(memory), WholeImageBytes(run.expected));
}

absl::Status CheckSealed(int fd, Bytes size) {
  const int seals = fcntl(fd, F_GET_SEALS);
  if (seals < 0 || (seals & kSeals) != kSeals) {
    return absl::FailedPreconditionError("the image is not sealed memory");
  }
  struct stat file;
  if (fstat(fd, &file) != 0) return ErrnoStatus("fstat of an image");
  if (file.st_size != size.count()) {
    return absl::DataLossError(
        absl::StrCat("the image has ", file.st_size, " bytes, expected ", size.count()));
  }
  return absl::OkStatus();
}

}  // namespace palimpsest
