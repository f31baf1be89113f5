// The memory of a node by itself: prints "ready" and where it listens, and serves until it is
// killed. Or one who stores a block in such memory and loads it until it is killed.
#include <unistd.h>

#include <cstdio>
#include <functional>
#include <string>
#include <vector>

#include "CLI/CLI.hpp"
#include "broker/tier/remote/peer_memory.h"
#include "broker/tier/remote/remote_backend.h"
#include "common/block_checksum.h"
#include "common/bytes.h"
#include "common/mutex.h"

namespace palimpsest {
namespace {

constexpr int kLoaders = 3;

int LoadForever(const RemoteBackend::Options& options) {
  RemoteBackend tier(options);
  std::vector<std::byte> block(1 << 20);
  std::vector<std::vector<std::byte>> to(kLoaders, block);
  BlockRecord record = {.id = {.tenant = "reader"}, .length = MiB(1)};
  record.checksum = BlockChecksum(record.id.key, block);
  if (!tier.Open().ok()) return 1;
  TierPlace place;
  Notification stored;
  tier.Write(record, block, [&](absl::StatusOr<TierPlace> written) {
    if (!written.ok()) ::_exit(1);
    place = *written;
    stored.Notify();
  });
  stored.WaitForNotification();
  std::function<void(int)> load = [&](int slot) {
    tier.Read(record, place, absl::MakeSpan(to[slot]), [&, slot](const absl::Status& status) {
      if (!status.ok()) ::_exit(1);
      load(slot);
    });
  };
  for (int i = 0; i < kLoaders; ++i) load(i);
  std::printf("ready\n");
  std::fflush(stdout);
  while (true) ::pause();
}

int Main(int argc, char** argv) {
  PeerMemory::Options options;
  std::string bytes = "16MiB";
  CLI::App app("Memory that a tier of another process keeps blocks in.");
  app.add_option("--bytes", bytes, "of memory")->capture_default_str();
  app.add_option("--listen", options.listen, "numeric address and port")->capture_default_str();
  app.add_option("--transports", options.transports, "as UCX_TLS")->capture_default_str();
  std::string load_from;
  app.add_option("--load-from", load_from, "another one's address: load from it");
  CLI11_PARSE(app, argc, argv);
  if (!load_from.empty()) {
    return LoadForever({.peer = load_from, .transports = options.transports});
  }
  const absl::StatusOr<Bytes> parsed = ParseBytes(bytes);
  if (!parsed.ok()) {
    std::fprintf(stderr, "%s\n", parsed.status().ToString().c_str());
    return 2;
  }
  options.bytes = *parsed;
  const auto memory = PeerMemory::Start(options);
  if (!memory.ok()) {
    std::fprintf(stderr, "%s\n", memory.status().ToString().c_str());
    return 1;
  }
  std::printf("ready %s\n", (*memory)->address().c_str());
  std::fflush(stdout);
  while (true) ::pause();
}

}  // namespace
}  // namespace palimpsest

int main(int argc, char** argv) { return palimpsest::Main(argc, argv); }
