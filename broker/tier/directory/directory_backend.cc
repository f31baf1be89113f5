#include "broker/tier/directory/directory_backend.h"

#include <fcntl.h>
#include <xxhash.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "common/random.h"

namespace palimpsest {
namespace {

constexpr char kMark[] = "palimpsest-tier";
constexpr char kMarkText[] = "A tier of KV blocks. Without this file nothing here is used.\n";
constexpr mode_t kFolderMode = 0700;
constexpr mode_t kFileMode = 0600;
constexpr int kFolderDigits = SeenFiles::kFolderBits / 4;
constexpr size_t kMaxGenerations = 4096;
// Of files that are remembered, for each block that somebody wants to know of: blocks of other
// tenants, expired and damaged ones.
constexpr size_t kFilesPerBlock = 8;
// Of a tenant whose file of its generation holds no number: all that was stored before is a miss.
constexpr uint64_t kUnknownGeneration = UINT64_MAX;
constexpr int kReadFlags = O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK;

std::string Hex(const BlockKey& key) { return absl::StrFormat("%016x%016x", key.high, key.low); }

bool IsVanished(int error) { return error == ENOENT || error == ESTALE; }

absl::Status CheckNode(const std::string& node) {
  const bool valid = !node.empty() && node.size() <= kMaxNodeName &&
                     std::all_of(node.begin(), node.end(), [](char c) {
                       return absl::ascii_isalnum(c) || c == '-' || c == '_';
                     });
  if (valid) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat("a node's name of ", node.size(),
                                                 " bytes; expected 1 to ", kMaxNodeName,
                                                 " letters, digits, '-' and '_'"));
}

template <typename T>
absl::Span<const std::byte> AsBytes(const T& value) {
  return {reinterpret_cast<const std::byte*>(value.data()), value.size()};
}

}  // namespace

DirectoryBackend::DirectoryBackend(const Options& options, FileOperations& files,
                                   const Clock& clock)
    : options_(options),
      files_(files),
      clock_(clock),
      instance_(absl::StrFormat("%016x", RandomSeed())),
      seen_(kFilesPerBlock * options.foreign_blocks) {}

Bytes DirectoryBackend::Footprint(Bytes length) const {
  return RoundUp(length, Bytes(kBlockFilePage)) + Bytes(kBlockFilePage);
}

std::string DirectoryBackend::Part(absl::string_view part) const {
  return absl::StrCat(options_.folder, "/", part);
}

std::string DirectoryBackend::FolderOf(const BlockKey& key) const {
  return absl::StrCat(Part(kBlocks), "/", Hex(key).substr(0, kFolderDigits));
}

std::string DirectoryBackend::PathOf(const BlockKey& key) const {
  return absl::StrCat(FolderOf(key), "/", Hex(key));
}

std::string DirectoryBackend::PurgedPath(const std::string& tenant) const {
  const XXH128_hash_t hash = XXH3_128bits(tenant.data(), tenant.size());
  return absl::StrCat(Part(kPurged), "/", Hex({hash.high64, hash.low64}));
}

absl::Status DirectoryBackend::Failure(absl::string_view what, const std::string& path, int error) {
  const std::string message =
      absl::StrCat("cannot ", what, " ", path, ": ", ErrnoStatus("", error).message());
  if (error == ENOSPC || error == EDQUOT) return absl::ResourceExhaustedError(message);
  if (!IsVanished(error)) return absl::UnavailableError(message);
  if (Mounted()) return absl::NotFoundError(message);
  return absl::UnavailableError(
      absl::StrCat(message, "; the tier's folder is gone: is the file system mounted?"));
}

bool DirectoryBackend::Mounted() {
  const std::string mark = Part(kMark);
  return UniqueFd(files_.Open(mark, kReadFlags, 0)).valid();
}

absl::Status DirectoryBackend::ReadExactly(int fd, const std::string& path,
                                           absl::Span<std::byte> to, off_t from) {
  while (!to.empty()) {
    const ssize_t got = files_.PRead(fd, to.data(), to.size(), from);
    if (got < 0) {
      if (errno == EINTR) continue;
      return Failure("read", path, errno);
    }
    if (got == 0) return absl::DataLossError(absl::StrCat(path, " is too short"));
    to.remove_prefix(got);
    from += got;
  }
  return absl::OkStatus();
}

absl::Status DirectoryBackend::WriteAll(int fd, const std::string& path,
                                        absl::Span<const std::byte> from) {
  while (!from.empty()) {
    const ssize_t written = files_.Write(fd, from.data(), from.size());
    if (written < 0) {
      if (errno == EINTR) continue;
      return Failure("write", path, errno);
    }
    if (written == 0) return Failure("write", path, EIO);
    from.remove_prefix(written);
  }
  return absl::OkStatus();
}

absl::Status DirectoryBackend::FlushFolder(const std::string& path) {
  const UniqueFd folder(files_.Open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC, 0));
  if (!folder.valid()) return Failure("flush", path, errno);
  // Some file systems have nothing to flush there, and say so.
  if (files_.FSync(folder.get()) != 0 && errno != EINVAL) return Failure("flush", path, errno);
  return absl::OkStatus();
}

absl::StatusOr<std::string> DirectoryBackend::WriteTemporary(
    std::initializer_list<absl::Span<const std::byte>> parts) {
  std::string path = absl::StrCat(Part(kTemporary), "/", options_.node, ".", instance_, ".",
                                  temporaries_.fetch_add(1));
  const UniqueFd file(files_.Open(path, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, kFileMode));
  absl::Status status = file.valid() ? absl::OkStatus() : Failure("make", path, errno);
  for (absl::Span<const std::byte> part : parts) {
    if (status.ok()) status = WriteAll(file.get(), path, part);
  }
  if (status.ok() && files_.FSync(file.get()) != 0) status = Failure("flush", path, errno);
  // Not this block alone is missing, but the folder that it was to be written to.
  if (absl::IsNotFound(status)) status = absl::UnavailableError(status.message());
  if (status.ok()) return path;
  if (file.valid()) files_.Unlink(path);
  return status;
}

absl::Status DirectoryBackend::Install(const std::string& temporary, const std::string& folder,
                                       const std::string& path) {
  absl::Status status;
  if (files_.Rename(temporary, path) != 0) {
    status = Failure("rename", path, errno);
    if (absl::IsNotFound(status)) {
      // The first block of its folder.
      if (files_.MakeFolder(folder, kFolderMode) != 0 && errno != EEXIST) {
        status = Failure("make", folder, errno);
      } else if (status = FlushFolder(Part(kBlocks)); status.ok()) {
        if (files_.Rename(temporary, path) != 0) status = Failure("rename", path, errno);
      }
    }
  }
  if (!status.ok()) files_.Unlink(temporary);
  if (absl::IsNotFound(status)) return absl::UnavailableError(status.message());
  return status;
}

absl::StatusOr<DirectoryBackend::OpenFile> DirectoryBackend::OpenBlock(const std::string& path) {
  OpenFile open;
  open.fd.Reset(files_.Open(path, kReadFlags, 0));
  if (!open.fd.valid()) return Failure("open", path, errno);
  std::vector<std::byte> bytes(kBlockFilePage);
  absl::Status status = ReadExactly(open.fd.get(), path, absl::MakeSpan(bytes), 0);
  if (!status.ok()) return status;
  const absl::StatusOr<size_t> size = BlockFileHeaderSize(bytes);
  if (!size.ok()) return size.status();
  bytes.resize(*size);
  status = ReadExactly(open.fd.get(), path, absl::MakeSpan(bytes).subspan(kBlockFilePage),
                       kBlockFilePage);
  if (!status.ok()) return status;
  absl::StatusOr<BlockFileHeader> header = DecodeBlockFileHeader(bytes);
  if (!header.ok()) return header.status();
  open.header = *std::move(header);
  open.header_bytes = *size;
  return open;
}

absl::StatusOr<TierPlace> DirectoryBackend::Write(const BlockRecord& record,
                                                  absl::Span<const std::byte> from) {
  const absl::StatusOr<uint64_t> generation = GenerationOf(record.id.tenant);
  if (!generation.ok()) return generation.status();
  const std::string path = PathOf(record.id.key);
  const absl::StatusOr<OpenFile> old = OpenBlock(path);
  if (old.ok() && old->header.node != options_.node && old->header.generation == *generation &&
      old->header.record.expiry > clock_.Now()) {
    return absl::AlreadyExistsError(absl::StrCat("node ", old->header.node, " has stored ", path));
  }
  const std::string header =
      EncodeBlockFileHeader({.record = record, .node = options_.node, .generation = *generation});
  const absl::StatusOr<std::string> temporary = WriteTemporary({AsBytes(header), from});
  if (!temporary.ok()) return temporary.status();
  const std::string folder = FolderOf(record.id.key);
  absl::Status status = Install(*temporary, folder, path);
  if (!status.ok()) return status;
  if (status = FlushFolder(folder); !status.ok()) {
    files_.Unlink(path);
    return absl::UnavailableError(status.message());
  }
  NoteOwn(record.id.key);
  return TierPlace(0);
}

absl::Status DirectoryBackend::Read(const BlockRecord& record, TierPlace,
                                    absl::Span<std::byte> to) {
  absl::Status status = ReadBlock(record, to);
  // There is something else, or will be.
  if (absl::IsNotFound(status) || absl::IsDataLoss(status)) ForgetSeen(record.id.key);
  return status;
}

absl::Status DirectoryBackend::ReadBlock(const BlockRecord& record, absl::Span<std::byte> to) {
  const std::string path = PathOf(record.id.key);
  const absl::StatusOr<OpenFile> open = OpenBlock(path);
  if (!open.ok()) return open.status();
  const BlockFileHeader& header = open->header;
  if (header.record.id != record.id || header.record.length != record.length ||
      header.record.checksum != record.checksum) {
    return absl::NotFoundError(absl::StrCat("node ", header.node, " has replaced ", path));
  }
  const absl::StatusOr<uint64_t> generation = GenerationOf(record.id.tenant);
  if (!generation.ok()) return generation.status();
  if (header.generation != *generation) {
    return absl::NotFoundError(absl::StrCat("tenant ", record.id.tenant, " was purged"));
  }
  return ReadExactly(open->fd.get(), path, to, static_cast<off_t>(open->header_bytes));
}

absl::StatusOr<StoredBlock> DirectoryBackend::Find(const BlockIdentity& id) {
  absl::StatusOr<OpenFile> open = OpenBlock(PathOf(id.key));
  // Its writer will find out and remove it.
  if (absl::IsDataLoss(open.status())) return absl::NotFoundError(open.status().message());
  if (!open.ok()) return open.status();
  return StoredBlock{std::move(open->header.record), TierPlace(0)};
}

absl::Status DirectoryBackend::Remove(const BlockRecord& record, TierPlace,
                                      TierBackend::RemoveReason) {
  const std::string path = PathOf(record.id.key);
  const absl::StatusOr<OpenFile> open = OpenBlock(path);
  ForgetSeen(record.id.key);
  if (!open.ok() && !absl::IsDataLoss(open.status())) return open.status();
  if (open.ok() && open->header.node != options_.node) return absl::OkStatus();
  if (files_.Unlink(path) != 0) return Failure("remove", path, errno);
  return FlushFolder(FolderOf(record.id.key));
}

absl::Status DirectoryBackend::Purge(const std::string& tenant) {
  uint64_t generation = 0;
  while (generation == 0) generation = RandomSeed();
  const std::string text = absl::StrFormat("%016x\n", generation);
  const absl::StatusOr<std::string> temporary = WriteTemporary({AsBytes(text)});
  if (!temporary.ok()) return temporary.status();
  absl::Status status = Install(*temporary, Part(kPurged), PurgedPath(tenant));
  if (status.ok()) Remember(tenant, generation);
  return status;
}

void DirectoryBackend::Remember(const std::string& tenant, uint64_t generation) {
  const absl::Time now = clock_.Now();
  MutexLock lock(&mu_);
  if (generations_.size() >= kMaxGenerations) generations_.clear();
  generations_[tenant] = {generation, now};
}

absl::StatusOr<uint64_t> DirectoryBackend::GenerationOf(const std::string& tenant) {
  const absl::Time now = clock_.Now();
  {
    MutexLock lock(&mu_);
    const auto known = generations_.find(tenant);
    if (known != generations_.end() && now - known->second.read_at < options_.generation_life) {
      return known->second.number;
    }
  }
  absl::StatusOr<uint64_t> generation = ReadGeneration(tenant);
  if (generation.ok()) Remember(tenant, *generation);
  return generation;
}

absl::StatusOr<uint64_t> DirectoryBackend::ReadGeneration(const std::string& tenant) {
  const std::string path = PurgedPath(tenant);
  const UniqueFd file(files_.Open(path, kReadFlags, 0));
  if (!file.valid()) {
    const int error = errno;
    const absl::Status status = Failure("open", path, error);
    // ESTALE would say that there was one.
    if (absl::IsNotFound(status) && error == ENOENT) return 0;
    return absl::UnavailableError(status.message());
  }
  std::string digits(16, '\0');
  const absl::Status status = ReadExactly(
      file.get(), path, {reinterpret_cast<std::byte*>(digits.data()), digits.size()}, 0);
  if (!status.ok() && !absl::IsDataLoss(status)) return absl::UnavailableError(status.message());
  uint64_t generation;
  return status.ok() && absl::SimpleHexAtoi(digits, &generation) ? generation : kUnknownGeneration;
}

absl::Status DirectoryBackend::CheckOptions() const {
  if (absl::Status status = CheckNode(options_.node); !status.ok()) return status;
  if (options_.folder.empty() || options_.folder[0] != '/' || options_.scanning_threads < 1 ||
      options_.orphan_age <= absl::ZeroDuration() ||
      options_.generation_life < absl::ZeroDuration()) {
    return absl::InvalidArgumentError(
        absl::StrCat("a file-system tier in '", options_.folder,
                     "'; expected an absolute path, at least one scanning thread, an orphan age "
                     "above 0 and a generation life of at least 0"));
  }
  return absl::OkStatus();
}

absl::Status DirectoryBackend::WriteMark() {
  const std::string mark = Part(kMark);
  const UniqueFd file(files_.Open(mark, O_WRONLY | O_CREAT | O_CLOEXEC, kFileMode));
  if (!file.valid()) return Failure("make", mark, errno);
  absl::Status status = WriteAll(file.get(), mark, AsBytes(absl::string_view(kMarkText)));
  if (status.ok() && files_.FSync(file.get()) != 0) status = Failure("flush", mark, errno);
  return status.ok() ? FlushFolder(options_.folder) : status;
}

absl::Status DirectoryBackend::PrepareFolder() {
  std::vector<std::string> names;
  if (files_.List(options_.folder, &names) != 0) {
    return absl::FailedPreconditionError(
        absl::StrCat("cannot list the folder of the file-system tier, ", options_.folder, ": ",
                     ErrnoStatus("").message(), "; make it once, below the mount point"));
  }
  const bool marked = std::find(names.begin(), names.end(), kMark) != names.end();
  // Another node may be making the tier at this moment.
  const bool foreign = std::any_of(names.begin(), names.end(), [](const std::string& name) {
    return name != kMark && name != kBlocks && name != kTemporary && name != kPurged &&
           name != "lost+found";
  });
  if (!marked && foreign) {
    return absl::FailedPreconditionError(
        absl::StrCat(options_.folder, " has files that are no tier's; expected an empty folder"));
  }
  for (const char* part : {kBlocks, kTemporary, kPurged}) {
    const std::string path = Part(part);
    if (files_.MakeFolder(path, kFolderMode) != 0 && errno != EEXIST) {
      return absl::FailedPreconditionError(
          absl::StrCat("cannot make ", path, ": ", ErrnoStatus("").message()));
    }
  }
  return marked ? absl::OkStatus() : WriteMark();
}

}  // namespace palimpsest
