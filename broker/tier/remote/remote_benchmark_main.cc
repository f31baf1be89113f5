// How fast blocks go to another process's memory over UCX and come back, beside copying them. Run
// by `bazel run`, which knows where that other process's program is.
#include <algorithm>
#include <cstdio>
#include <cstring>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "CLI/CLI.hpp"
#include "broker/tier/remote/peer_process.h"
#include "broker/tier/remote/remote_backend.h"
#include "common/block_checksum.h"
#include "common/bytes.h"
#include "common/monotonic_time.h"
#include "common/mutex.h"

namespace palimpsest {
namespace {

struct Settings {
  Bytes block;
  int depth = 8;
  double seconds = 2;
};

void Print(const char* transports, const char* what, int64_t blocks, const Settings& settings,
           absl::Duration took) {
  const double bytes = static_cast<double>(blocks) * static_cast<double>(settings.block.count());
  std::printf("%-8s %-6s %9.0f MB/s  %8.1f us a block\n", transports, what,
              bytes / absl::ToDoubleSeconds(took) / 1e6,
              absl::ToDoubleMicroseconds(took) / static_cast<double>(std::max<int64_t>(blocks, 1)));
}

using Done = std::function<void(const absl::Status&)>;

// Keeps `depth` operations under way: `start(slot, done)`.
absl::Status Measure(const char* transports, const char* what, const Settings& settings,
                     const std::function<void(int, Done)>& start) {
  Mutex mutex;
  CondVar changed;
  std::vector<int> idle;
  for (int i = 0; i < settings.depth; ++i) idle.push_back(i);
  int64_t blocks = 0;
  absl::Status failure;
  const absl::Time began = MonotonicNow();
  const absl::Time end = began + absl::Seconds(settings.seconds);
  while (true) {
    int slot = 0;
    {
      MutexLock lock(&mutex);
      const bool over = MonotonicNow() >= end || !failure.ok();
      while (over ? idle.size() < static_cast<size_t>(settings.depth) : idle.empty()) {
        changed.Wait(&mutex);
      }
      if (over) break;
      slot = idle.back();
      idle.pop_back();
    }
    start(slot, [&, slot](const absl::Status& status) {
      MutexLock lock(&mutex);
      ++blocks;
      if (!status.ok()) failure = status;
      idle.push_back(slot);
      changed.Signal();
    });
  }
  Print(transports, what, blocks, settings, MonotonicNow() - began);
  return failure;
}

void MeasureCopy(const Settings& settings) {
  std::vector<std::vector<std::byte>> from(
      settings.depth, std::vector<std::byte>(settings.block.count(), std::byte{1}));
  std::vector<std::vector<std::byte>> to = from;
  int64_t blocks = 0;
  const absl::Time began = MonotonicNow();
  while (MonotonicNow() < began + absl::Seconds(settings.seconds)) {
    const int slot = static_cast<int>(blocks++ % settings.depth);
    std::memcpy(to[slot].data(), from[slot].data(), from[slot].size());
  }
  Print("", "copy", blocks, settings, MonotonicNow() - began);
}

absl::Status MeasureRemote(const char* transports, const Settings& settings) {
  const Bytes memory = RoundUp(settings.block, KiB(4)) * (settings.depth * 2);
  const absl::StatusOr<PeerProcess> peer = PeerProcess::Start(
      {"--transports", transports, "--bytes", absl::StrCat(memory.count() / 1024, "KiB")});
  if (!peer.ok()) return peer.status();
  RemoteBackend tier({.peer = peer->address, .transports = transports});
  if (const auto found = tier.Open(); !found.ok()) return found.status();
  std::vector<std::vector<std::byte>> buffers;
  std::vector<BlockRecord> records(settings.depth);
  std::vector<TierPlace> places(settings.depth);
  for (int i = 0; i < settings.depth; ++i) {
    buffers.emplace_back(settings.block.count(), static_cast<std::byte>(i));
    records[i] = {.id = {.key = {1, static_cast<uint64_t>(i)}, .tenant = "benchmark"},
                  .length = settings.block,
                  .checksum = BlockChecksum({1, static_cast<uint64_t>(i)}, buffers[i])};
  }
  const auto write = [&](int slot, Done done) {
    tier.Write(records[slot], buffers[slot],
               [&, slot, done = std::move(done)](const absl::StatusOr<TierPlace>& place) {
                 if (place.ok()) places[slot] = *place;
                 done(place.status());
               });
  };
  absl::Status status = Measure(transports, "store", settings, [&](int slot, const Done& done) {
    if (places[slot] == TierPlace()) return write(slot, done);
    tier.Remove(records[slot], places[slot], TierBackend::RemoveReason::kUnwanted,
                [](const absl::Status&) {});
    write(slot, done);
  });
  if (status.ok()) {
    status = Measure(transports, "load", settings, [&](int slot, Done done) {
      tier.Read(records[slot], places[slot], absl::MakeSpan(buffers[slot]), std::move(done));
    });
  }
  tier.Close();
  return status;
}

int Main(int argc, char** argv) {
  Settings settings;
  std::string block = "2MiB";
  CLI::App app("Bandwidth of a tier in another process's memory.");
  app.add_option("--block", block, "length of a block")->capture_default_str();
  app.add_option("--depth", settings.depth, "operations under way")
      ->check(CLI::Range(1, 64))
      ->capture_default_str();
  app.add_option("--seconds", settings.seconds, "of each measurement")->capture_default_str();
  CLI11_PARSE(app, argc, argv);
  const absl::StatusOr<Bytes> parsed = ParseBytes(block);
  if (!parsed.ok() || *parsed < Bytes(1) || *parsed > GiB(1)) {
    std::fprintf(stderr, "a block has 1 byte to 1 GiB\n");
    return 2;
  }
  settings.block = *parsed;
  MeasureCopy(settings);
  for (const char* transports : {"tcp", "all"}) {
    if (absl::Status status = MeasureRemote(transports, settings); !status.ok()) {
      std::fprintf(stderr, "%s: %s\n", transports, status.ToString().c_str());
      return 1;
    }
  }
  return 0;
}

}  // namespace
}  // namespace palimpsest

int main(int argc, char** argv) { return palimpsest::Main(argc, argv); }
