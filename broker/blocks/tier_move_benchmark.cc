// How fast a broker moves blocks of 2 MiB from T1 to a disk (T3) and back: its whole path, with
// checksums, bookkeeping and the tier's log. Prints one line of JSON. tools/bench/tier_fio.py runs
// it beside fio on the same file.
#include <algorithm>
#include <cstdio>
#include <nlohmann/json.hpp>
#include <string>

#include "CLI/CLI.hpp"
#include "absl/strings/str_cat.h"
#include "absl/strings/substitute.h"
#include "broker/blocks/testing/socket_block_worker.h"
#include "broker/server/broker_server.h"
#include "broker/server/testing/test_node.h"
#include "common/bytes.h"
#include "common/grpc_status.h"
#include "common/grpc_time.h"
#include "common/monotonic_time.h"
#include "common/yaml_config.h"

namespace palimpsest {
namespace {

constexpr Bytes kBlock = MiB(2);
constexpr absl::Duration kPatience = absl::Minutes(1);
// The sequence that is moved, and one that only has chunks of T1 made.
constexpr uint64_t kMoved = 1, kFiller = 2;

struct Settings {
  std::string file;
  std::string size = "3GiB";
  uint32_t blocks = 256;
  int depth = 16;
};

class MoveBenchmark {
 public:
  explicit MoveBenchmark(const Settings& settings) : settings_(settings), worker_(kBlock.count()) {}

  absl::StatusOr<nlohmann::json> Run() {
    absl::Status status = Start();
    if (status.ok()) status = Put(kMoved);
    if (!status.ok()) return status;
    const auto store = Store();
    if (!store.ok()) return store.status();
    if (status = MakeChunks(); !status.ok()) return status;
    const auto load = Load();
    if (!load.ok()) return load.status();
    return nlohmann::json{
        {"blocks", settings_.blocks},         {"block_bytes", kBlock.count()},
        {"loads_in_flight", settings_.depth}, {"stores_in_flight", (settings_.depth + 1) / 2},
        {"store_bytes_per_s", Rate(*store)},  {"load_bytes_per_s", Rate(*load)}};
  }

 private:
  double Rate(absl::Duration took) const {
    return static_cast<double>((kBlock * settings_.blocks).count()) / absl::ToDoubleSeconds(took);
  }

  absl::Status Start() {
    const auto size = ParseBytes(settings_.size);
    if (!size.ok()) return size.status();
    // The node has two tenants, of which the other one gets as much.
    const Bytes dram = RoundUp(kBlock * settings_.blocks * 5 / 4, MiB(64)) * 2;
    auto yaml = YamlConfig::Parse(
        absl::Substitute("$0tiers:\n"
                         "  dram: {bytes: $1 MiB, chunk_bytes: 64 MiB, unmap_deadline: 2m}\n"
                         "  nvme: {bytes: $2 MiB, path: \"$3\", depth: $4}\n"
                         "  policy: lru\n",
                         node_.Config(16), dram / MiB(1), *size / MiB(1), settings_.file,
                         settings_.depth),
        "broker.yaml");
    if (!yaml.ok()) return yaml.status();
    const auto config = ReadBrokerConfig(*yaml, "");
    if (!config.ok()) return config.status();
    auto server = BrokerServer::Start(*config, [](const absl::Status& status) {
      std::fprintf(stderr, "%s\n", status.ToString().c_str());
      std::exit(EXIT_FAILURE);
    });
    if (!server.ok()) return server.status();
    server_ = *std::move(server);
    const auto channel =
        grpc::CreateChannel("unix:" + node_.control(), grpc::InsecureChannelCredentials());
    broker_ = v1::Broker::NewStub(channel);
    admin_ = v1::BlockAdmin::NewStub(
        grpc::CreateChannel(absl::StrCat("unix:", node_.folder(), "/state/operator.sock"),
                            grpc::InsecureChannelCredentials()));
    absl::Status status = worker_.Hello(node_.descriptors(), "alpha", TestNode::Secret("alpha"));
    if (status.ok()) status = worker_.Attach(node_.control());
    if (!status.ok()) return status;
    return Await("the disk tier", [](const v1::GetStatusResponse& now) {
      return now.tiers_size() == 2 && now.tiers(1).serving();
    });
  }

  template <typename Condition>
  absl::Status Await(const char* what, Condition condition) {
    const bool came = Eventually(
        [&] {
          grpc::ClientContext context;
          context.set_deadline(GrpcTimeout(kPatience));
          v1::GetStatusResponse now;
          return broker_->GetStatus(&context, {}, &now).ok() && condition(now);
        },
        kPatience);
    if (came) return absl::OkStatus();
    return absl::DeadlineExceededError(absl::StrCat("waited in vain for ", what));
  }

  absl::Status Put(uint64_t sequence) {
    absl::StatusOr<uint32_t> there = 0;
    const bool all = Eventually(
        [&] {
          there = worker_.Put(sequence, settings_.blocks);
          return !there.ok() || *there == settings_.blocks;
        },
        kPatience);
    if (there.ok() && !all) {
      return absl::DeadlineExceededError(absl::StrCat("only ", *there, " blocks found room"));
    }
    return there.status();
  }

  absl::StatusOr<absl::Duration> Store() {
    grpc::ClientContext context;
    context.set_deadline(GrpcTimeout(kPatience));
    v1::TrimRequest request;
    request.set_tier(v1::TIER_DRAM);
    request.set_tenant("alpha");
    v1::TrimResponse response;
    const absl::Time start = MonotonicNow();
    absl::Status status = FromGrpcStatus(admin_->Trim(&context, request, &response));
    if (!status.ok()) return status;
    status = Await("the blocks to go down", [this](const v1::GetStatusResponse& now) {
      return now.tiers(0).tenants(0).blocks() == 0 &&
             now.tiers(1).tenants(0).blocks() == settings_.blocks;
    });
    if (!status.ok()) return status;
    return MonotonicNow() - start;
  }

  // Memory that is made and cleared is not what is measured.
  absl::Status MakeChunks() {
    if (absl::Status status = Put(kFiller); !status.ok()) return status;
    v1::HintRequest hint;
    *hint.mutable_session() = worker_.session();
    hint.mutable_action()->mutable_release();
    *hint.mutable_chain() = worker_.Chain(kFiller, settings_.blocks);
    grpc::ClientContext context;
    context.set_deadline(GrpcTimeout(kPatience));
    v1::HintResponse response;
    absl::Status status = FromGrpcStatus(worker_.stub().Hint(&context, hint, &response));
    if (!status.ok()) return status;
    return Await("room in T1", [](const v1::GetStatusResponse& now) {
      return now.tiers(0).tenants(0).blocks() == 0;
    });
  }

  absl::StatusOr<absl::Duration> Load() {
    const absl::Time start = MonotonicNow();
    const auto acquired = worker_.Acquire(kMoved, settings_.blocks, /*request=*/1, kPatience);
    const absl::Duration took = MonotonicNow() - start;
    if (!acquired.ok()) return acquired.status();
    if (acquired->blocks_size() != static_cast<int>(settings_.blocks)) {
      return absl::InternalError(absl::StrCat(acquired->blocks_size(), " blocks came back"));
    }
    if (absl::Status status = worker_.EndRequest(1); !status.ok()) return status;
    // Compares the bytes.
    const auto good = worker_.Get(kMoved, settings_.blocks, /*request=*/2, absl::ZeroDuration());
    if (!good.ok()) return good.status();
    if (*good != settings_.blocks) {
      return absl::DataLossError(absl::StrCat("only ", *good, " blocks came back whole"));
    }
    return took;
  }

  const Settings settings_;
  TestNode node_;
  std::unique_ptr<BrokerServer> server_;
  std::unique_ptr<v1::Broker::Stub> broker_;
  std::unique_ptr<v1::BlockAdmin::Stub> admin_;
  SocketBlockWorker worker_;
};

int Main(int argc, char** argv) {
  Settings settings;
  CLI::App app("How fast a broker moves blocks of 2 MiB between T1 and a disk.");
  app.add_option("--file", settings.file, "the disk tier's file, which may be overwritten")
      ->required();
  app.add_option("--size", settings.size, "of the file")->capture_default_str();
  app.add_option("--blocks", settings.blocks, "that go down and come back")
      ->check(CLI::Range(1, 4096))
      ->capture_default_str();
  app.add_option("--depth", settings.depth, "the tier's depth; half of it for stores")
      ->check(CLI::Range(1, 1024))
      ->capture_default_str();
  CLI11_PARSE(app, argc, argv);
  const auto result = MoveBenchmark(settings).Run();
  if (!result.ok()) {
    std::fprintf(stderr, "%s\n", result.status().ToString().c_str());
    return 1;
  }
  std::printf("%s\n", result->dump().c_str());
  return 0;
}

}  // namespace
}  // namespace palimpsest

int main(int argc, char** argv) { return palimpsest::Main(argc, argv); }
