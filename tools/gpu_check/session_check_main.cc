// Checks of whole sessions on a GPU: a broker in this process, workers in processes of their own;
// grants from one tenant to another and how long they take, parameters that are restored, a worker
// that is killed, a broker that restarts, and what all of it leaves behind.
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_replace.h"
#include "absl/time/clock.h"
#include "broker/server/broker_server.h"
#include "broker/server/testing/test_node.h"
#include "broker/server/testing/worker_process.h"
#include "common/monotonic_time.h"
#include "common/yaml_config.h"
#include "tools/gpu_check/check_report.h"
#include "tools/gpu_check/gpu_worker.h"

namespace palimpsest {
namespace {

using Limit = CheckReport::Limit;

constexpr int kGrant = 32;  // 1 GiB, on one GPU
constexpr int kRounds = 5;

// Of each GPU, in MiB, as nvidia-smi tells; empty if it does not.
std::vector<double> UsedMebibytes() {
  FILE* const pipe = popen("nvidia-smi --query-gpu=memory.used --format=csv,noheader,nounits", "r");
  std::vector<double> all;
  char line[64] = "";
  double used = 0;
  while (pipe != nullptr && fgets(line, sizeof line, pipe) != nullptr) {
    if (absl::SimpleAtod(line, &used)) all.push_back(used);
  }
  if (pipe != nullptr) pclose(pipe);
  return all;
}

std::string OwnPath() { return std::filesystem::read_symlink("/proc/self/exe").string(); }

class SessionCheck {
 public:
  // A grant is of 1 GiB in all, spread over the GPUs.
  SessionCheck(CheckReport& report, bool trusted, int gpus)
      : report_(report),
        trusted_(trusted),
        gpus_(gpus),
        grant_(kGrant / gpus),
        prefix_(absl::StrCat(gpus > 1 ? "stripes." : "", trusted ? "scrub." : "retire.")) {}

  void Run() {
    const double before = Used();
    if (!StartBroker()) return;
    const double broker = Used();
    report_.Inform(prefix_ + "broker_context", broker - before - pool_mebibytes_, "MiB",
                   "what the broker takes beside the pool");
    Workers();
    Restart();
    alpha_.reset();
    beta_.reset();
    const bool free = Eventually([&] {
      const v1::GetStatusResponse status = server_->broker().Status();
      return status.free_slabs() == status.pool_slabs();
    });
    const v1::GetStatusResponse status = server_->broker().Status();
    report_.Verify(prefix_ + "every_slab_free_at_the_end", free,
                   absl::StrCat(status.free_slabs(), " of ", status.pool_slabs()));
    report_.Expect(prefix_ + "ledger", server_->broker().CheckConsistency());
    server_.reset();
    Eventually([&] { return Used() <= before + 64; }, absl::Seconds(5));
    const double after = Used();
    report_.Verify(prefix_ + "no_memory_left_behind", after <= before + 64,
                   absl::StrCat("used before ", before, " MiB, after ", after, " MiB"));
  }

 private:
  // Of the pool's GPUs together, in MiB.
  double Used() const {
    double sum = 0;
    for (const double used : UsedMebibytes()) sum += used;
    return sum;
  }

  // As a list of numbers from 0.
  std::string Gpus() const {
    std::string gpus = "0";
    for (int i = 1; i < gpus_; ++i) absl::StrAppend(&gpus, ",", i);
    return gpus;
  }

  bool StartBroker() {
    const int slabs = grant_ + 2 + image_slabs_;
    pool_mebibytes_ = slabs * 32.0 * gpus_;
    std::string yaml = absl::StrReplaceAll(
        node_.Config(0, "  min_residence: 10ms\n  residence_restores: 0\n",
                     "    workspace: 32 MiB\n    context: 0 MiB\n"),
        {{"bytes: 0 MiB", absl::StrCat("backend: cuda\n  gpus: [", Gpus(),
                                       "]\n  trusted_workers: ", trusted_ ? "true" : "false",
                                       "\n  bytes: ", slabs * 32, " MiB")},
         {"packer: worker/model/packer",
          absl::StrCat("packer: ",
                       (std::filesystem::path(OwnPath()).parent_path() / "packer").string())}});
    auto parsed = YamlConfig::Parse(yaml, "broker.yaml");
    if (!report_.Expect("broker.config", parsed.status())) return false;
    auto config = ReadBrokerConfig(*parsed, "");
    if (!report_.Expect("broker.config", config.status())) return false;
    auto server = BrokerServer::Start(
        *config, [this](const absl::Status& status) { report_.Expect("broker.fatal", status); });
    if (!report_.Expect("broker.start", server.status())) return false;
    server_ = *std::move(server);
    return true;
  }

  std::unique_ptr<WorkerProcess> Connected(const std::string& tenant) {
    auto worker = WorkerProcess::Start({OwnPath(), "--worker"});
    if (!report_.Expect("worker.start", worker.status())) return nullptr;
    auto process = std::make_unique<WorkerProcess>(*std::move(worker));
    const auto answer =
        process->Do(absl::StrCat("connect unix:", node_.control(), " ", node_.descriptors(), " ",
                                 tenant, " ", TestNode::Secret(tenant), " ", Gpus()));
    if (!report_.Expect("worker.connect", answer.status())) return nullptr;
    return process;
  }

  std::string Must(WorkerProcess& worker, const std::string& command) {
    const auto answer = worker.Do(command);
    report_.Expect(absl::StrCat(prefix_, command), answer.status());
    return answer.value_or("");
  }

  void Yes(WorkerProcess& worker, const std::string& command, const std::string& name) {
    const std::string answer = Must(worker, command);
    report_.Verify(prefix_ + name, answer == "yes", answer);
  }

  struct Moved {
    absl::Duration time;
    std::string parts;
  };

  // From the giver's release, when nothing uses its slabs any more, to the last slab mapped and
  // zero at the taker: as the two processes see it.
  Moved Move(WorkerProcess& giver, WorkerProcess& taker) {
    Must(taker, absl::StrCat("target ", grant_));
    (void)taker.Tell(absl::StrCat("await ", grant_));
    absl::SleepFor(absl::Milliseconds(20));
    (void)giver.Tell("release");
    const absl::Time start = TimeOf(giver.Hear(), "release");
    const absl::Time end = TimeOf(taker.Hear(), "grant");
    return {end - start, PartsSince(start)};
  }

  absl::Time TimeOf(const absl::StatusOr<std::string>& answer, const std::string& what) {
    int64_t microseconds = 0;
    if (report_.Expect(prefix_ + what, answer.status())) {
      (void)absl::SimpleAtoi(*answer, &microseconds);
    }
    return absl::FromUnixMicros(microseconds);
  }

  // When what happened to the slabs, in ms since `start`, as the broker saw it.
  std::string PartsSince(absl::Time start) {
    const double begin = absl::ToDoubleSeconds(start - absl::UnixEpoch());
    double received = 0, scrubbed_first = 0, scrubbed_last = 0, mapped = 0;
    const v1::GetStatusResponse status = server_->broker().Status();
    for (const v1::Transfer& transfer : status.transfers()) {
      const double at = transfer.finished_at() - begin;
      if (at < 0) continue;
      if (transfer.kind() == v1::Transfer::KIND_SCRUB) {
        if (scrubbed_first == 0) {
          received = at - transfer.seconds();
          scrubbed_first = at;
        }
        scrubbed_last = at;
      } else if (transfer.kind() == v1::Transfer::KIND_GRANT) {
        mapped = transfer.seconds();
      }
    }
    return absl::StrFormat(
        "given back at %.2f ms, first cleaned %.2f, last %.2f; last grant mapped within %.2f",
        received * 1e3, scrubbed_first * 1e3, scrubbed_last * 1e3, mapped * 1e3);
  }

  void Workers() {
    const double before = Used();
    alpha_ = Connected("alpha");
    if (alpha_ == nullptr) return;
    report_.Inform(prefix_ + "worker_context", Used() - before, "MiB",
                   "context, stream, kernels of one worker");
    beta_ = Connected("beta");
    if (beta_ == nullptr) return;
    Yes(*alpha_, "workspace", "workspace");
    Must(*alpha_, "activate");
    Yes(*alpha_, "parameters", "parameters_are_the_images");
    Must(*alpha_, absl::StrCat("target ", grant_));
    Must(*alpha_, absl::StrCat("await ", grant_));
    Yes(*alpha_, "holds 0", "fresh_slabs_are_zero");
    Must(*alpha_, "fill 171");
    const Moved first = Move(*alpha_, *beta_);
    report_.Measure(prefix_ + "grant_1gib_first", absl::ToDoubleMilliseconds(first.time), "ms",
                    Limit::kAtMost, trusted_ ? 10 : 100, first.parts);
    Yes(*beta_, "holds 0", "nothing_of_the_first_tenant_is_seen");
    std::vector<Moved> repeated;
    for (int round = 0; round < kRounds; ++round) {
      Must(*beta_, "fill 187");
      repeated.push_back(Move(*beta_, *alpha_));
      Must(*alpha_, "fill 188");
      repeated.push_back(Move(*alpha_, *beta_));
    }
    Yes(*beta_, "holds 0", "nothing_of_the_first_tenant_is_seen_later");
    // Both have had every slab by then.
    repeated.erase(repeated.begin());
    std::sort(repeated.begin(), repeated.end(),
              [](const Moved& a, const Moved& b) { return a.time < b.time; });
    const Moved& median = repeated[repeated.size() / 2];
    report_.Measure(prefix_ + "grant_1gib_repeated", absl::ToDoubleMilliseconds(median.time), "ms",
                    Limit::kAtMost, trusted_ ? 3 : 100,
                    absl::StrCat("worst ", absl::ToDoubleMilliseconds(repeated.back().time),
                                 " ms; ", median.parts));
    Kill();
  }

  // beta dies with a pattern in every slab; alpha gets them.
  void Kill() {
    Must(*beta_, "fill 4660");
    Must(*alpha_, absl::StrCat("target ", grant_));
    const absl::Time start = MonotonicNow();
    report_.Expect(prefix_ + "kill", beta_->Kill());
    Must(*alpha_, absl::StrCat("await ", grant_));
    report_.Inform(prefix_ + "grant_after_kill", absl::ToDoubleMilliseconds(MonotonicNow() - start),
                   "ms", "SIGKILL to the last slab mapped by another tenant");
    Yes(*alpha_, "holds 0", "nothing_of_a_killed_worker_is_seen");
    beta_ = Connected("beta");
  }

  // The broker goes and comes; alpha keeps what it has.
  void Restart() {
    if (alpha_ == nullptr || beta_ == nullptr) return;
    Must(*alpha_, "fill 51966");
    server_->Shutdown();
    server_.reset();
    const absl::Time start = MonotonicNow();
    if (!StartBroker()) return;
    report_.Inform(prefix_ + "broker_start", absl::ToDoubleMilliseconds(MonotonicNow() - start),
                   "ms");
    Must(*alpha_, "reattached");
    Must(*beta_, "reattached");
    Yes(*alpha_, "holds 51966", "content_survives_the_broker");
    Yes(*alpha_, "parameters", "parameters_survive_the_broker");
    const v1::TenantMemory status = server_->broker().Status().tenants(0);
    report_.Verify(prefix_ + "every_slab_comes_back",
                   status.kv_slabs() == grant_ && status.workspace_slabs() == 1 &&
                       status.parameter_slabs() == status.image_slabs(),
                   absl::StrCat(status.parameter_slabs(), " parameter, ", status.kv_slabs(),
                                " KV, ", status.workspace_slabs(), " workspace slabs"));
    (void)Move(*alpha_, *beta_);
    Yes(*beta_, "holds 0", "returned_slabs_are_cleaned");
  }

  CheckReport& report_;
  const bool trusted_;
  const int gpus_;
  const int grant_;  // slabs
  const std::string prefix_;
  const int image_slabs_ = TestNode::kImageSlabs;
  double pool_mebibytes_ = 0;
  TestNode node_;
  std::unique_ptr<BrokerServer> server_;
  std::unique_ptr<WorkerProcess> alpha_, beta_;
};

// On so many GPUs; 0: on one, and as stripes on two where there are two.
int Run(int only) {
  CheckReport report;
  // Reading memory through nvidia-smi.
  const int gpus = static_cast<int>(std::min<size_t>(UsedMebibytes().size(), 2));
  if (gpus == 0) report.Verify("nvidia-smi", false, "nvidia-smi gives no memory.used");
  for (int count = only > 0 ? only : 1; count <= (only > 0 ? only : gpus); ++count) {
    for (const bool trusted : {true, false}) SessionCheck(report, trusted, count).Run();
  }
  return report.exit_status();
}

}  // namespace
}  // namespace palimpsest

int main(int argc, char** argv) {
  if (argc == 2 && std::string(argv[1]) == "--worker") palimpsest::RunGpuWorker();
  int only = 0;
  if (argc == 3 && std::string(argv[1]) == "--gpus") (void)absl::SimpleAtoi(argv[2], &only);
  return palimpsest::Run(only);
}
