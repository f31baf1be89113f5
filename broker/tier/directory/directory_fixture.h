// Folders of a shared file system for tests, with calls that fail, and the blocks that go there.
#ifndef PALIMPSEST_BROKER_TIER_DIRECTORY_DIRECTORY_FIXTURE_H_
#define PALIMPSEST_BROKER_TIER_DIRECTORY_DIRECTORY_FIXTURE_H_

#include <sys/stat.h>

#include <atomic>
#include <cerrno>
#include <cstdlib>
#include <filesystem>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "broker/tier/directory/directory_backend.h"
#include "broker/tier/tier_backend.h"
#include "common/block_checksum.h"
#include "gtest/gtest.h"

namespace palimpsest {

// Counts calls, and makes one of them, or all from one on, fail.
class FaultyFiles : public FileOperations {
 public:
  int Open(const std::string& path, int flags, mode_t mode) override {
    return Fails(path) ? -1 : FileOperations::Open(path, flags, mode);
  }
  ssize_t Write(int fd, const std::byte* from, size_t size) override {
    if (Fails("")) {
      // What a full or torn disk took before it failed.
      if (torn_) (void)FileOperations::Write(fd, from, size / 2);
      return -1;
    }
    return FileOperations::Write(fd, from, short_ ? std::min<size_t>(size, 1000) : size);
  }
  ssize_t PRead(int fd, std::byte* to, size_t size, off_t offset) override {
    ++reads_;
    if (Fails("")) return -1;
    return FileOperations::PRead(fd, to, short_ ? std::min<size_t>(size, 1000) : size, offset);
  }
  int FSync(int fd) override { return Fails("") ? -1 : FileOperations::FSync(fd); }
  int Rename(const std::string& from, const std::string& to) override {
    return Fails(to) ? -1 : FileOperations::Rename(from, to);
  }
  int Unlink(const std::string& path) override {
    return Fails(path) ? -1 : FileOperations::Unlink(path);
  }
  int List(const std::string& path, std::vector<std::string>* names) override {
    ++lists_;
    return Fails(path) ? -1 : FileOperations::List(path, names);
  }
  int MakeFolder(const std::string& path, mode_t mode) override {
    return Fails(path) ? -1 : FileOperations::MakeFolder(path, mode);
  }

  void FailAt(int call, int error, bool and_all_after = false) {
    calls_ = 0;
    fail_at_ = call;
    error_ = error;
    all_after_ = and_all_after;
    failed_ = false;
  }
  // All calls for paths that contain `part`.
  void FailPath(std::string part, int error) {
    FailAt(-1, error);
    path_ = std::move(part);
  }
  void Heal() {
    FailAt(-1, 0);
    path_.clear();
  }
  void set_short(bool is_short) { short_ = is_short; }
  void set_torn(bool torn) { torn_ = torn; }
  bool failed() const { return failed_; }
  int reads() const { return reads_; }
  int lists() const { return lists_; }

 private:
  bool Fails(const std::string& path) {
    const int call = calls_++;
    const bool fails = (fail_at_ >= 0 && (call == fail_at_ || (all_after_ && call > fail_at_))) ||
                       (!path_.empty() && absl::StrContains(path, path_));
    if (!fails) return false;
    failed_ = true;
    errno = error_;
    return true;
  }

  std::atomic<int> calls_ = 0;
  std::atomic<int> reads_ = 0;
  std::atomic<int> lists_ = 0;
  int fail_at_ = -1;
  int error_ = 0;
  bool all_after_ = false;
  bool short_ = false;
  bool torn_ = false;
  std::string path_;
  std::atomic<bool> failed_ = false;
};

inline std::vector<std::byte> Content(uint64_t seed, size_t size = 10000) {
  std::vector<std::byte> bytes(size);
  for (size_t i = 0; i < size; ++i) bytes[i] = static_cast<std::byte>(seed * 131 + i * 7);
  return bytes;
}

inline BlockRecord Record(uint64_t number, const std::string& tenant = "anna",
                          uint64_t version = 0) {
  BlockRecord record = {.id = {.key = {number << 52, number},
                               .parent = {1, 2},
                               .tokens = {static_cast<TokenId>(number), 7},
                               .tenant = tenant},
                        .length = Bytes(10000)};
  record.checksum = BlockChecksum(record.id.key, Content(number + version));
  return record;
}

class DirectoryBackendTest : public testing::Test {
 protected:
  DirectoryBackendTest() {
    std::string folder = testing::TempDir() + "/tierXXXXXX";
    folder_ = ::mkdtemp(folder.data());
  }
  ~DirectoryBackendTest() override { std::filesystem::remove_all(folder_); }

  std::unique_ptr<DirectoryBackend> Make(const std::string& node) {
    return std::make_unique<DirectoryBackend>(
        DirectoryBackend::Options{.folder = folder_,
                                  .node = node,
                                  .generation_life = absl::ZeroDuration(),
                                  .scanning_threads = 2},
        files_, clock_);
  }
  // A node's tier as it is after a start, with what that found.
  std::unique_ptr<DirectoryBackend> Start(const std::string& node,
                                          std::vector<StoredBlock>* found = nullptr) {
    auto backend = Make(node);
    auto blocks = backend->Open();
    EXPECT_EQ(blocks.status(), absl::OkStatus());
    if (found != nullptr && blocks.ok()) *found = *std::move(blocks);
    return backend;
  }

  absl::Status Write(DirectoryBackend& backend, const BlockRecord& record, uint64_t version = 0) {
    return backend.Write(record, Content(record.id.key.low + version)).status();
  }
  // OK only with the right bytes.
  absl::Status Read(DirectoryBackend& backend, const BlockRecord& record) {
    std::vector<std::byte> bytes(record.length.count());
    absl::Status status = backend.Read(record, TierPlace(0), absl::MakeSpan(bytes));
    if (status.ok() && BlockChecksum(record.id.key, bytes) != record.checksum) {
      return absl::DataLossError("wrong bytes");
    }
    return status;
  }
  absl::Status Remove(DirectoryBackend& backend, const BlockRecord& record) {
    return backend.Remove(record, TierPlace(0), TierBackend::RemoveReason::kUnwanted);
  }

  std::vector<std::string> FilesBelow(const std::string& part) {
    std::vector<std::string> files;
    for (const auto& entry : std::filesystem::recursive_directory_iterator(folder_ + "/" + part)) {
      if (entry.is_regular_file()) files.push_back(entry.path());
    }
    return files;
  }

  std::string folder_;
  FaultyFiles files_;
  FakeClock clock_;
};

}  // namespace palimpsest

#endif  // PALIMPSEST_BROKER_TIER_DIRECTORY_DIRECTORY_FIXTURE_H_
