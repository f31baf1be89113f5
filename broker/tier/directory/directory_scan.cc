// What a directory tier finds in its folders: its own blocks when it is opened, those of other
// nodes again and again, and what dead ones left behind.
#include <algorithm>
#include <cerrno>
#include <thread>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "broker/tier/directory/directory_backend.h"

namespace palimpsest {
namespace {

// Of one look.
constexpr int kFoldersALook = 16;
constexpr size_t kHeadersALook = 64;
constexpr size_t kOpenedALook = 1024;
// A file that is of no use, or could not be read, is looked at again.
constexpr absl::Duration kLookAgain = absl::Minutes(10);

std::optional<size_t> FolderNumber(const std::string& name) {
  uint32_t number;
  if (!absl::SimpleHexAtoi(name, &number) || number >= SeenFiles::kFolders ||
      absl::StrFormat("%03x", number) != name) {
    return std::nullopt;
  }
  return number;
}

std::optional<BlockKey> KeyOf(const std::string& name) {
  BlockKey key;
  if (name.size() != 32 || !absl::SimpleHexAtoi(name.substr(0, 16), &key.high) ||
      !absl::SimpleHexAtoi(name.substr(16), &key.low) ||
      absl::StrFormat("%016x%016x", key.high, key.low) != name) {
    return std::nullopt;
  }
  return key;
}

}  // namespace

absl::Time DirectoryBackend::TimeOfFileSystem() {
  const absl::StatusOr<std::string> fresh = WriteTemporary({});
  if (!fresh.ok()) return absl::InfinitePast();
  absl::Time now;
  if (files_.ModifiedAt(*fresh, &now) != 0) now = absl::InfinitePast();
  files_.Unlink(*fresh);
  return now;
}

bool DirectoryBackend::IsOld(const std::string& path) {
  absl::Time modified;
  return files_.ModifiedAt(path, &modified) == 0 && modified + options_.orphan_age < opened_at_;
}

void DirectoryBackend::SweepTemporaries() {
  const std::string folder = Part(kTemporary);
  std::vector<std::string> names;
  if (files_.List(folder, &names) != 0) return;
  for (const std::string& name : names) {
    const std::string path = absl::StrCat(folder, "/", name);
    const bool own = absl::StartsWith(name, options_.node + ".");
    const bool orphan =
        own ? !absl::StartsWith(name, absl::StrCat(options_.node, ".", instance_)) : IsOld(path);
    if (orphan) files_.Unlink(path);
  }
}

DirectoryBackend::Examined DirectoryBackend::Examine(const std::string& path) {
  Examined examined;
  absl::StatusOr<OpenFile> open = OpenBlock(path);
  if (!open.ok()) {
    if (absl::IsNotFound(open.status())) examined.kind = Examined::Kind::kVanished;
    if (absl::IsDataLoss(open.status())) examined.kind = Examined::Kind::kDamaged;
    return examined;
  }
  examined.header = std::move(open->header);
  const BlockFileHeader& header = examined.header;
  const bool own = header.node == options_.node;
  examined.kind = own ? Examined::Kind::kOwn : Examined::Kind::kForeign;
  const absl::StatusOr<uint64_t> generation = GenerationOf(header.record.id.tenant);
  if (!generation.ok()) return examined;
  examined.serves = header.record.expiry > clock_.Now() && header.generation == *generation &&
                    path == PathOf(header.record.id.key);
  return examined;
}

void DirectoryBackend::ScanFolder(const std::string& folder, std::vector<StoredBlock>* found) {
  std::vector<std::string> names;
  if (files_.List(folder, &names) != 0) return;
  for (const std::string& name : names) {
    const std::string path = absl::StrCat(folder, "/", name);
    Examined examined = Examine(path);
    const BlockRecord& record = examined.header.record;
    switch (examined.kind) {
      case Examined::Kind::kVanished:
      case Examined::Kind::kUnreadable:
        break;
      case Examined::Kind::kDamaged:
        // Nobody knows whose file that is. A young one may be whole for its writer.
        if (IsOld(path)) files_.Unlink(path);
        break;
      case Examined::Kind::kOwn:
        if (!examined.serves.has_value()) break;
        if (*examined.serves) {
          NoteOwn(record.id.key);
          found->push_back({std::move(examined.header.record), TierPlace(0)});
        } else {
          files_.Unlink(path);
        }
        break;
      case Examined::Kind::kForeign:
        if (record.expiry < clock_.Now() - options_.orphan_age) {
          files_.Unlink(path);
        } else if (examined.serves.value_or(false) && Wants(examined.header)) {
          KeepForDiscover(std::move(examined.header));
        }
        break;
    }
  }
}

absl::StatusOr<std::vector<StoredBlock>> DirectoryBackend::Open() {
  if (absl::Status status = CheckOptions(); !status.ok()) return status;
  if (absl::Status status = PrepareFolder(); !status.ok()) return status;
  opened_at_ = TimeOfFileSystem();
  SweepTemporaries();
  const std::string root = absl::StrCat(Part(kBlocks), "/");
  std::vector<std::string> folders;
  if (files_.List(root, &folders) != 0) return Failure("list", root, errno);
  std::atomic<size_t> next = 0;
  std::vector<std::vector<StoredBlock>> found(options_.scanning_threads);
  std::vector<std::thread> threads;
  for (std::vector<StoredBlock>& part : found) {
    threads.emplace_back([&] {
      for (size_t i = next++; i < folders.size(); i = next++) ScanFolder(root + folders[i], &part);
    });
  }
  for (std::thread& thread : threads) thread.join();
  std::vector<StoredBlock> blocks;
  for (std::vector<StoredBlock>& part : found) {
    std::move(part.begin(), part.end(), std::back_inserter(blocks));
  }
  return blocks;
}

void DirectoryBackend::NoteOwn(const BlockKey& key) {
  if (options_.foreign_blocks == 0) return;
  MutexLock lock(&mu_);
  seen_.SetOwn(key);
}

void DirectoryBackend::ForgetSeen(const BlockKey& key) {
  MutexLock lock(&mu_);
  (void)seen_.Forget(key);
}

bool DirectoryBackend::Wants(const BlockFileHeader& header) const {
  const std::string& tenant = header.record.id.tenant;
  return tenant != kProbeTenant &&
         (options_.tenants.empty() || std::find(options_.tenants.begin(), options_.tenants.end(),
                                                tenant) != options_.tenants.end());
}

// Those beyond what anybody wants to know of are read once more.
void DirectoryBackend::KeepForDiscover(BlockFileHeader header) {
  MutexLock lock(&mu_);
  if (opened_.size() >= options_.foreign_blocks) return;
  const BlockRecord& record = header.record;
  seen_.SetTold(record.id.key, record.id.tenant, header.generation, record.expiry);
  opened_.push_back({std::move(header.record), TierPlace(0)});
}

absl::Status DirectoryBackend::BeginRound() {
  round_ = {};
  const std::string root = Part(kBlocks);
  std::vector<std::string> names;
  if (files_.List(root, &names) != 0) return Failure("list", root, errno);
  for (const std::string& name : names) {
    const std::optional<size_t> folder = FolderNumber(name);
    if (folder.has_value()) round_.folders.push_back(*folder);
  }
  std::vector<std::string> tenants;
  {
    MutexLock lock(&mu_);
    tenants = seen_.tenants();
  }
  for (const std::string& tenant : tenants) {
    const absl::StatusOr<uint64_t> generation = GenerationOf(tenant);
    if (generation.ok()) round_.generations[tenant] = *generation;
  }
  round_.begun = true;
  return absl::OkStatus();
}

absl::Status DirectoryBackend::ListNext(Discovery* told) {
  const size_t folder = round_.folders.back();
  round_.folders.pop_back();
  std::vector<std::string> names;
  const std::string path = absl::StrCat(Part(kBlocks), "/", absl::StrFormat("%03x", folder));
  if (files_.List(path, &names) != 0) {
    const int error = errno;
    // What lies in a folder that cannot be listed is found out by those who load it.
    return Mounted() ? absl::OkStatus() : Failure("list", path, error);
  }
  std::vector<BlockKey> keys;
  for (const std::string& name : names) {
    const std::optional<BlockKey> key = KeyOf(name);
    if (key.has_value()) keys.push_back(*key);
  }
  MutexLock lock(&mu_);
  SeenFiles::Listed listed = seen_.OnListed(folder, keys, round_.generations, clock_.Now());
  round_.due = std::move(listed.due);
  std::move(listed.gone.begin(), listed.gone.end(), std::back_inserter(told->gone));
  return absl::OkStatus();
}

void DirectoryBackend::LookAt(const BlockKey& key, Discovery* told) {
  Examined examined = Examine(PathOf(key));
  BlockRecord& record = examined.header.record;
  const bool tells = examined.kind == Examined::Kind::kForeign && examined.serves.value_or(false) &&
                     Wants(examined.header);
  MutexLock lock(&mu_);
  std::optional<Discovery::Gone> before = seen_.Forget(key);
  if (tells) {
    seen_.SetTold(key, record.id.tenant, examined.header.generation, record.expiry);
    told->found.push_back({std::move(record), TierPlace(0)});
    return;
  }
  if (before.has_value()) told->gone.push_back(*std::move(before));
  if (examined.kind == Examined::Kind::kOwn) {
    seen_.SetOwn(key);
  } else if (examined.kind != Examined::Kind::kVanished) {
    seen_.SetUseless(key, clock_.Now() + kLookAgain);
  }
}

absl::StatusOr<Discovery> DirectoryBackend::Discover() {
  Discovery told;
  {
    MutexLock lock(&mu_);
    while (!opened_.empty() && told.found.size() < kOpenedALook) {
      told.found.push_back(std::move(opened_.back()));
      opened_.pop_back();
    }
    if (!told.found.empty()) return told;
  }
  absl::Status status = round_.begun ? absl::OkStatus() : BeginRound();
  size_t headers = 0;
  for (int folders = 0; status.ok(); ++folders) {
    for (; !round_.due.empty() && headers < kHeadersALook; ++headers) {
      const BlockKey key = round_.due.back();
      round_.due.pop_back();
      LookAt(key, &told);
    }
    if (!round_.due.empty()) return told;
    if (round_.folders.empty()) {
      told.complete = true;
      break;
    }
    if (folders == kFoldersALook) return told;
    status = ListNext(&told);
  }
  round_.begun = false;
  if (status.ok()) return told;
  // What was found before is told, for it is not looked at again.
  if (told.found.empty() && told.gone.empty()) return status;
  told.complete = true;
  return told;
}

}  // namespace palimpsest
