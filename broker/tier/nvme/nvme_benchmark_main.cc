// How fast blocks go to a disk and come back, at a depth: the device alone, and the tier, which
// writes its log and flushes beside them. Compare with fio on the same file:
//   fio --name=x --filename=FILE --size=SIZE --bs=2M --direct=1 --ioengine=io_uring --iodepth=DEPTH
//       --rw=randread|randwrite --time_based --runtime=5
#include <algorithm>
#include <cstdio>
#include <deque>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "CLI/CLI.hpp"
#include "broker/tier/encryption/sealed_backend.h"
#include "broker/tier/nvme/file_device.h"
#include "broker/tier/nvme/nvme_backend.h"
#include "common/clock.h"
#include "common/monotonic_time.h"
#include "common/mutex.h"

namespace palimpsest {
namespace {

struct Settings {
  FileDeviceOptions file;
  Bytes block;
  int depth = 16;
  double seconds = 5;
  bool encipher = false;
};

using Done = std::function<void(absl::Status)>;

// Keeps `depth` operations under way for a while; `start(slot, done)` begins one, or returns false
// if there is nothing left to do. Prints the rate.
void Measure(const char* what, const Settings& settings,
             const std::function<bool(int, Done)>& start) {
  Mutex mutex;
  CondVar changed;
  std::deque<int> idle;
  for (int i = 0; i < settings.depth; ++i) idle.push_back(i);
  int64_t completed = 0, failed = 0;
  const absl::Time began = MonotonicNow();
  const absl::Time end = began + absl::Seconds(settings.seconds);
  bool over = false;
  while (true) {
    int slot = 0;
    {
      MutexLock lock(&mutex);
      over |= MonotonicNow() >= end;
      while (over ? idle.size() < static_cast<size_t>(settings.depth) : idle.empty()) {
        changed.Wait(&mutex);
      }
      if (over) break;
      slot = idle.front();  // all take turns, so that each has stored something
      idle.pop_front();
    }
    const bool begun = start(slot, [&, slot](const absl::Status& status) {
      MutexLock lock(&mutex);
      ++(status.ok() ? completed : failed);
      idle.push_back(slot);
      changed.Signal();
    });
    if (begun) continue;
    MutexLock lock(&mutex);
    idle.push_back(slot);
    over = true;
  }
  const double seconds = absl::ToDoubleSeconds(MonotonicNow() - began);
  const double rate = static_cast<double>(completed * settings.block.count()) / seconds;
  std::printf("%-14s %8.1f MB/s   %lld blocks, %lld failed\n", what, rate / 1e6,
              static_cast<long long>(completed), static_cast<long long>(failed));
}

std::vector<AlignedBuffer> Buffers(const Settings& settings) {
  std::mt19937_64 random(1);
  std::vector<AlignedBuffer> buffers;
  for (int i = 0; i < settings.depth; ++i) {
    buffers.emplace_back(settings.block);
    for (std::byte& byte : buffers.back().span()) byte = static_cast<std::byte>(random());
  }
  return buffers;
}

absl::Status MeasureDevice(const Settings& settings) {
  auto device = OpenFileDevice(settings.file);
  if (!device.ok()) return device.status();
  const std::vector<AlignedBuffer> buffers = Buffers(settings);
  const int64_t places = settings.file.size / settings.block / settings.depth;
  std::mt19937_64 random(2);
  // Each slot has a part of the file to itself, as transfers must not overlap.
  const auto offset = [&](int slot) {
    return settings.block * (slot * places + static_cast<int64_t>(random() % places));
  };
  Measure("device write", settings, [&](int slot, Done done) {
    (*device)->Submit(IoRequest::Write(offset(slot), buffers[slot].span(), std::move(done)));
    return true;
  });
  Measure("device read", settings, [&](int slot, Done done) {
    (*device)->Submit(IoRequest::Read(offset(slot), buffers[slot].span(), std::move(done)));
    return true;
  });
  // What the tier does not take for its own.
  const AlignedBuffer zero(kIoUnit * 2);
  return WriteAndWait(**device, Bytes(0), zero.span());
}

// Blocks are written until the tier is nearly full.
absl::Status MeasureTier(const Settings& settings) {
  std::unique_ptr<TierBackend> owned =
      std::make_unique<NvmeBackend>([&] { return OpenFileDevice(settings.file); }, Clock::Real());
  if (settings.encipher) {
    owned = std::make_unique<SealedBackend>(std::move(owned), TenantKeys());
  }
  TierBackend& tier = *owned;
  if (absl::StatusOr<std::vector<StoredBlock>> found = tier.Open(); !found.ok()) {
    return found.status();
  }
  const std::vector<AlignedBuffer> buffers = Buffers(settings);
  struct Stored {
    BlockRecord record;
    TierPlace place;
  };
  // One list for each slot, so that no two operations share a block.
  std::vector<std::vector<Stored>> stored(settings.depth);
  const size_t most = NvmeBackend::CapacityOf(settings.file.size) / tier.Footprint(settings.block) /
                      settings.depth * 9 / 10;
  uint64_t id = 0;
  std::vector<BlockRecord> writing(settings.depth);
  Measure("tier write", settings, [&](int slot, Done done) {
    if (stored[slot].size() >= most) return false;
    writing[slot].id = {{++id, 0}, {}, std::vector<TokenId>(16), kProbeTenant};
    writing[slot].length = settings.block;
    tier.Write(writing[slot], buffers[slot].span(),
               [&, slot, done = std::move(done)](absl::StatusOr<TierPlace> place) {
                 if (place.ok()) stored[slot].push_back({writing[slot], *place});
                 done(place.status());
               });
    return true;
  });
  std::mt19937_64 random(3);
  Measure("tier read", settings, [&](int slot, Done done) {
    const Stored& block = stored[slot][random() % stored[slot].size()];
    tier.Read(block.record, block.place, buffers[slot].span(), std::move(done));
    return true;
  });
  tier.Close();
  return absl::OkStatus();
}

int Main(int argc, char** argv) {
  Settings settings;
  std::string size = "4GiB", block = "2MiB";
  CLI::App app("Bandwidth of an NVMe tier.");
  app.add_option("--file", settings.file.path, "a file that may be overwritten")->required();
  app.add_option("--size", size, "of the file; it is made if it is missing")->capture_default_str();
  app.add_option("--block", block, "length of a block")->capture_default_str();
  app.add_option("--depth", settings.depth, "operations under way")
      ->check(CLI::Range(1, 1024))
      ->capture_default_str();
  app.add_option("--seconds", settings.seconds, "of each measurement")->capture_default_str();
  app.add_flag("--encipher", settings.encipher, "blocks on their way to the tier");
  app.add_flag("!--no-io-uring", settings.file.io_uring, "threads in its place");
  CLI11_PARSE(app, argc, argv);
  const absl::StatusOr<Bytes> size_bytes = ParseBytes(size), block_bytes = ParseBytes(block);
  if (!size_bytes.ok() || !block_bytes.ok() || block_bytes->count() % kIoUnit.count() != 0 ||
      *block_bytes * settings.depth * 4 > *size_bytes) {
    std::fprintf(stderr,
                 "the file must hold four blocks, multiples of 4 KiB, for each operation\n");
    return 2;
  }
  settings.file.size = *size_bytes;
  settings.file.depth = settings.depth * 2;
  settings.file.threads = settings.depth;
  settings.block = *block_bytes;
  absl::Status status = MeasureDevice(settings);
  if (status.ok()) status = MeasureTier(settings);
  if (status.ok()) return 0;
  std::fprintf(stderr, "%s\n", status.ToString().c_str());
  return 1;
}

}  // namespace
}  // namespace palimpsest

int main(int argc, char** argv) { return palimpsest::Main(argc, argv); }
