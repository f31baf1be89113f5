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
#include "absl/strings/str_replace.h"
#include "absl/time/clock.h"
#include "broker/server/broker_server.h"
#include "broker/server/testing/test_node.h"
#include "broker/server/testing/worker_process.h"
#include "common/yaml_config.h"
#include "tools/gpu_check/check_report.h"
#include "tools/gpu_check/gpu_worker.h"

namespace palimpsest {
namespace {

using Limit = CheckReport::Limit;

constexpr Bytes kSlab = MiB(32);
constexpr int kGrant = 32;  // 1 GiB
constexpr int kRounds = 5;

// Of the whole GPU, in MiB, as nvidia-smi tells; -1 if it does not.
double UsedMebibytes() {
  FILE* const pipe =
      popen("nvidia-smi -i 0 --query-gpu=memory.used --format=csv,noheader,nounits", "r");
  char line[64] = "";
  double used = -1;
  if (pipe != nullptr && fgets(line, sizeof line, pipe) != nullptr) {
    (void)absl::SimpleAtod(line, &used);
  }
  if (pipe != nullptr) pclose(pipe);
  return used;
}

std::string OwnPath() { return std::filesystem::read_symlink("/proc/self/exe").string(); }

class SessionCheck {
 public:
  SessionCheck(CheckReport& report, bool trusted)
      : report_(report), trusted_(trusted), prefix_(trusted ? "scrub." : "retire.") {}

  void Run() {
    const double before = UsedMebibytes();
    if (!StartBroker()) return;
    const double broker = UsedMebibytes();
    report_.Inform(prefix_ + "broker_context", broker - before - pool_mebibytes_, "MiB",
                   "what the broker takes beside the pool");
    Workers();
    Restart();
    alpha_.reset();
    beta_.reset();
    report_.Verify(prefix_ + "every_slab_free_at_the_end", Eventually([&] {
                     return server_->broker().Status().free_slabs() ==
                            server_->broker().Status().pool_slabs();
                   }),
                   server_->broker().Status().ShortDebugString().substr(0, 200));
    report_.Expect(prefix_ + "ledger", server_->broker().CheckConsistency());
    server_.reset();
    Eventually([&] { return UsedMebibytes() <= before + 64; }, absl::Seconds(5));
    const double after = UsedMebibytes();
    report_.Verify(prefix_ + "no_memory_left_behind", after <= before + 64,
                   absl::StrCat("used before ", before, " MiB, after ", after, " MiB"));
  }

 private:
  bool StartBroker() {
    const int slabs = kGrant + 2 + image_slabs_;
    pool_mebibytes_ = slabs * 32.0;
    std::string yaml = absl::StrReplaceAll(
        node_.Config(0, "  min_residence: 10ms\n  residence_restores: 0\n",
                     "    workspace: 32 MiB\n"),
        {{"bytes: 0 MiB",
          absl::StrCat("backend: cuda\n  gpus: [0]\n  trusted_workers: ",
                       trusted_ ? "true" : "false", "\n  bytes: ", slabs * 32, " MiB")},
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
                                 tenant, " ", TestNode::Secret(tenant)));
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

  // From the giver's release, nothing of it in use any more, to the taker's last slab mapped.
  absl::Duration Move(WorkerProcess& giver, WorkerProcess& taker) {
    Must(taker, absl::StrCat("target ", kGrant));
    (void)taker.Tell(absl::StrCat("await ", kGrant));
    absl::SleepFor(absl::Milliseconds(20));
    const absl::Time start = absl::Now();
    (void)giver.Tell("release");
    report_.Expect(prefix_ + "grant", taker.Hear().status());
    const absl::Duration time = absl::Now() - start;
    report_.Expect(prefix_ + "release", giver.Hear().status());
    return time;
  }

  std::string LastMoves() {
    std::string text;
    const v1::GetStatusResponse status = server_->broker().Status();
    const int count = status.transfers_size();
    for (int i = std::max(0, count - 2); i < count; ++i) {
      const v1::Transfer& transfer = status.transfers(i);
      absl::StrAppend(&text, v1::Transfer::Kind_Name(transfer.kind()).substr(5), " ",
                      transfer.slabs(), " slabs ", transfer.seconds() * 1e3, " ms; ");
    }
    return text;
  }

  void Workers() {
    const double before = UsedMebibytes();
    alpha_ = Connected("alpha");
    if (alpha_ == nullptr) return;
    report_.Inform(prefix_ + "worker_context", UsedMebibytes() - before, "MiB",
                   "context, stream, kernels of one worker");
    beta_ = Connected("beta");
    if (beta_ == nullptr) return;
    Yes(*alpha_, "workspace", "workspace");
    Must(*alpha_, "activate");
    Yes(*alpha_, "parameters", "parameters_are_the_images");
    Must(*alpha_, absl::StrCat("target ", kGrant));
    Must(*alpha_, absl::StrCat("await ", kGrant));
    Yes(*alpha_, "holds 0", "fresh_slabs_are_zero");
    Must(*alpha_, "fill 171");
    const absl::Duration first = Move(*alpha_, *beta_);
    const std::string moves = LastMoves();
    report_.Measure(prefix_ + "grant_1gib_first", absl::ToDoubleMilliseconds(first), "ms",
                    Limit::kAtMost, trusted_ ? 10 : 100, moves);
    Yes(*beta_, "holds 0", "nothing_of_the_first_tenant_is_seen");
    std::vector<absl::Duration> repeated;
    for (int round = 0; round < kRounds; ++round) {
      Must(*beta_, "fill 187");
      repeated.push_back(Move(*beta_, *alpha_));
      Must(*alpha_, "fill 188");
      repeated.push_back(Move(*alpha_, *beta_));
    }
    Yes(*beta_, "holds 0", "nothing_of_the_first_tenant_is_seen");
    // The first of them still imports.
    repeated.erase(repeated.begin());
    std::sort(repeated.begin(), repeated.end());
    report_.Measure(
        prefix_ + "grant_1gib_repeated", absl::ToDoubleMilliseconds(repeated[repeated.size() / 2]),
        "ms", Limit::kAtMost, trusted_ ? 3 : 100,
        absl::StrCat("worst ", absl::ToDoubleMilliseconds(repeated.back()), " ms; ", LastMoves()));
    Kill();
  }

  // beta dies with a pattern in every slab; alpha gets them.
  void Kill() {
    Must(*beta_, "fill 4660");
    Must(*alpha_, absl::StrCat("target ", kGrant));
    const absl::Time start = absl::Now();
    report_.Expect(prefix_ + "kill", beta_->Kill());
    Must(*alpha_, absl::StrCat("await ", kGrant));
    report_.Inform(prefix_ + "grant_after_kill", absl::ToDoubleMilliseconds(absl::Now() - start),
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
    const absl::Time start = absl::Now();
    if (!StartBroker()) return;
    report_.Inform(prefix_ + "broker_start", absl::ToDoubleMilliseconds(absl::Now() - start), "ms");
    Must(*alpha_, "reattached");
    Must(*beta_, "reattached");
    Yes(*alpha_, "holds 51966", "content_survives_the_broker");
    Yes(*alpha_, "parameters", "parameters_survive_the_broker");
    const v1::TenantMemory status = server_->broker().Status().tenants(0);
    report_.Verify(prefix_ + "every_slab_comes_back",
                   status.kv_slabs() == kGrant && status.workspace_slabs() == 1 &&
                       status.parameter_slabs() == status.image_slabs(),
                   status.ShortDebugString().substr(0, 200));
    (void)Move(*alpha_, *beta_);
    Yes(*beta_, "holds 0", "returned_slabs_are_cleaned");
  }

  CheckReport& report_;
  const bool trusted_;
  const std::string prefix_;
  const int image_slabs_ = TestNode::kImageSlabs;
  double pool_mebibytes_ = 0;
  TestNode node_;
  std::unique_ptr<BrokerServer> server_;
  std::unique_ptr<WorkerProcess> alpha_, beta_;
};

int Run() {
  CheckReport report;
  // Reading memory through nvidia-smi.
  if (UsedMebibytes() < 0) report.Verify("nvidia-smi", false, "nvidia-smi gives no memory.used");
  SessionCheck(report, /*trusted=*/true).Run();
  SessionCheck(report, /*trusted=*/false).Run();
  return report.exit_status();
}

}  // namespace
}  // namespace palimpsest

int main(int argc, char** argv) {
  if (argc == 2 && std::string(argv[1]) == "--worker") palimpsest::RunGpuWorker();
  return palimpsest::Run();
}
