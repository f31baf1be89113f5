#include "tools/gpu_check/grant_rate.h"

#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "broker/server/broker_server.h"
#include "broker/server/testing/test_node.h"
#include "broker/server/testing/worker_process.h"
#include "common/yaml_config.h"
#include "tools/gpu_check/timing.h"

namespace palimpsest {
namespace {

constexpr Bytes kGranted = GiB(1);
constexpr Bytes kWorkspace = MiB(32);
constexpr int kRounds = 5;

class GrantRate {
 public:
  // `step`: slabs that are asked for at a time.
  GrantRate(CheckReport& report, const std::string& name, Bytes slab, int step)
      : report_(report), name_(absl::StrCat("grant.", name)), slab_(slab), step_(step) {}

  // GB/s of memory that the worker had before, from the first demand to the last slab mapped; 0 if
  // that failed.
  double Run() {
    if (!StartBroker() || !StartWorker()) return 0;
    const std::optional<absl::Duration> first = Grow();
    std::vector<absl::Duration> repeated;
    while (first.has_value() && repeated.size() < kRounds) {
      const std::optional<absl::Duration> time = Grow();
      if (!time.has_value()) return 0;
      repeated.push_back(*time);
    }
    if (!first.has_value()) return 0;
    const double rate = GigabytesPerSecond(kGranted, Median(repeated));
    report_.Inform(name_ + "_first", GigabytesPerSecond(kGranted, *first), "GB/s",
                   "of memory that the worker sees for the first time");
    report_.Inform(name_, rate, "GB/s",
                   absl::StrCat("1 GiB in slabs of ", slab_.ToString(), ", ", step_, " at a time"));
    return rate;
  }

 private:
  static std::filesystem::path Self() { return std::filesystem::read_symlink("/proc/self/exe"); }
  int slabs() const { return static_cast<int>(kGranted / slab_); }

  bool StartBroker() {
    const int64_t workspaces = 2 * (kWorkspace / slab_);
    const int64_t pool = slabs() + workspaces + 2 * TestNode::kImageSlabs;
    const std::string yaml = absl::StrReplaceAll(
        node_.Config(
            0, "",
            absl::StrCat("    workspace: ", kWorkspace / MiB(1), " MiB\n    context: 0 MiB\n")),
        {{"bytes: 0 MiB", absl::StrCat("backend: cuda\n  slab_bytes: ", slab_ / MiB(1),
                                       " MiB\n  bytes: ", pool * (slab_ / MiB(1)), " MiB")},
         {"packer: worker/model/packer",
          absl::StrCat("packer: ", (Self().parent_path() / "packer").string())}});
    auto parsed = YamlConfig::Parse(yaml, "broker.yaml");
    if (!report_.Expect(name_ + ".config", parsed.status())) return false;
    auto config = ReadBrokerConfig(*parsed, "");
    if (!report_.Expect(name_ + ".config", config.status())) return false;
    auto server = BrokerServer::Start(
        *config, [this](const absl::Status& status) { report_.Expect(name_ + ".broker", status); });
    if (!report_.Expect(name_ + ".broker", server.status())) return false;
    server_ = *std::move(server);
    return true;
  }

  bool StartWorker() {
    auto worker = WorkerProcess::Start({Self().string(), "--worker"});
    if (!report_.Expect(name_ + ".worker", worker.status())) return false;
    worker_ = std::make_unique<WorkerProcess>(*std::move(worker));
    const auto answer =
        worker_->Do(absl::StrCat("connect unix:", node_.control(), " ", node_.descriptors(),
                                 " alpha ", TestNode::Secret("alpha"), " 0"));
    free_ = server_->broker().Status().free_slabs();
    return report_.Expect(name_ + ".connect", answer.status());
  }

  std::optional<absl::Duration> Grow() {
    const auto grown = worker_->Do(absl::StrCat("grow ", slabs(), " ", step_));
    int64_t microseconds = 0;
    if (!report_.Expect(name_ + ".grow", grown.status()) ||
        !absl::SimpleAtoi(*grown, &microseconds)) {
      return std::nullopt;
    }
    if (!report_.Expect(name_ + ".release", worker_->Do("release").status())) return std::nullopt;
    if (!Eventually([this] { return server_->broker().Status().free_slabs() == free_; })) {
      report_.Verify(name_ + ".release", false, "slabs were not cleaned in time");
      return std::nullopt;
    }
    return absl::Microseconds(microseconds);
  }

  CheckReport& report_;
  const std::string name_;
  const Bytes slab_;
  const int step_;
  uint32_t free_ = 0;
  TestNode node_;
  std::unique_ptr<BrokerServer> server_;
  std::unique_ptr<WorkerProcess> worker_;
};

}  // namespace

void CheckGrantRate(CheckReport& report) {
  constexpr Bytes kSlab = MiB(32), kPage = MiB(2);
  const double slabs = GrantRate(report, "slabs", kSlab, static_cast<int>(kGranted / kSlab)).Run();
  const double pages =
      GrantRate(report, "pages_at_once", kPage, static_cast<int>(kGranted / kPage)).Run();
  const double single = GrantRate(report, "pages_one_at_a_time", kPage, 1).Run();
  if (slabs == 0 || pages == 0 || single == 0) return;
  report.Measure("grant.slabs.ratio", slabs / single, "", CheckReport::Limit::kAtLeast, 1,
                 "to pages of 2 MiB, one at a time");
  report.Inform("grant.pages_at_once.ratio", pages / single, "",
                "to pages of 2 MiB, one at a time");
}

}  // namespace palimpsest
