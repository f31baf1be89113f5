#include "broker/blocks/testing/soak_worker.h"

#include <csignal>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "common/testing/eventually.h"

namespace palimpsest {
namespace {

constexpr absl::Duration kPatience = absl::Seconds(60);

}  // namespace

SoakCounts& SoakCounts::operator+=(const SoakCounts& more) {
  operations += more.operations;
  stored += more.stored;
  asked += more.asked;
  compared += more.compared;
  damaged += more.damaged;
  restarts += more.restarts;
  return *this;
}

absl::Status SoakWorker::Start() {
  {
    MutexLock lock(&mu_);
    process_ = nullptr;
  }
  auto process = WorkerProcess::Start({"broker/blocks/block_worker_process"});
  if (!process.ok()) return process.status();
  {
    MutexLock lock(&mu_);
    process_ = std::make_unique<WorkerProcess>(*std::move(process));
    mine_ = process_.get();
    killed_ = false;
  }
  generation_ = node_.generation();
  attached_ = false;
  absl::Status last;
  // An earlier one may not be known to be gone yet.
  const bool attached = Eventually(
      [&] {
        if (killed_ || node_.broker_down()) return true;
        last = mine_->Do(node_.Hello(tenant_)).status();
        if (last.ok()) last = mine_->Do("attach " + node_.control()).status();
        attached_ = last.ok();
        return attached_;
      },
      kPatience);
  if (attached) return absl::OkStatus();
  return absl::Status(last.code(),
                      absl::StrCat("a worker of ", tenant_, " cannot attach: ", last.message()));
}

absl::Status SoakWorker::Refresh() {
  if (attached_ && !killed_ && generation_ == node_.generation()) return absl::OkStatus();
  ++counts_.restarts;
  return Start();
}

void SoakWorker::Kill() {
  MutexLock lock(&mu_);
  if (process_ == nullptr) return;
  killed_ = true;
  (void)process_->Kill();
}

void SoakWorker::Signal(int signal) {
  MutexLock lock(&mu_);
  if (process_ != nullptr) (void)process_->Signal(signal);
}

absl::StatusOr<uint64_t> SoakWorker::Do(const std::string& command) {
  if (!attached_) return absl::UnavailableError("there is no broker to work with");
  ++counts_.operations;
  const auto answer = mine_->Do(command);
  if (!answer.ok()) {
    return absl::Status(answer.status().code(), absl::StrCat("a worker of ", tenant_, ": ", command,
                                                             ": ", answer.status().message()));
  }
  uint64_t number = 0;
  return absl::SimpleAtoi(*answer, &number) ? number : 0;
}

bool SoakWorker::Excused(const absl::Status& status) const {
  // Nothing excuses bytes that are wrong.
  if (absl::StrContains(status.message(), "DATA_LOSS")) return false;
  return killed_ || node_.broker_down() || generation_ != node_.generation();
}

absl::Status SoakWorker::Run(const std::atomic<bool>& stop, bool damages) {
  while (!stop) {
    absl::Status status = Step(damages);
    if (status.ok()) continue;
    if (!Excused(status)) return status;
    ++counts_.restarts;
    // A session that was attached to a broker that is gone ends with its process.
    const bool broker = Eventually([&] { return !node_.broker_down() || stop; }, kPatience);
    if (stop || !broker) break;
    if (status = Start(); !status.ok()) return status;
  }
  return absl::OkStatus();
}

absl::Status SoakWorker::Step(bool damages) {
  const uint64_t sequence = 1 + random_() % kSequences;
  switch (random_() % 8) {
    case 0:
    case 1:
    case 2:
      return Write(sequence);
    case 3:
    case 4:
    case 5:
      return Read(sequence, random_() % 2 == 0 ? 0 : 50 + random_() % 1000);
    case 6:
      return HoldAndRead(sequence, damages);
    default:
      return Hint(sequence);
  }
}

absl::Status SoakWorker::Write(uint64_t sequence) {
  const uint32_t length = LengthOf(sequence);
  if (random_() % 3 > 0) {
    const auto there = Do(absl::StrCat("put ", sequence, " ", length));
    if (there.ok()) counts_.stored += *there;
    return there.status();
  }
  const auto reserved = Do(absl::StrCat("reserve ", sequence, " ", length));
  if (!reserved.ok()) return reserved.status();
  const bool commits = random_() % 2 == 0;
  if (commits) counts_.stored += *reserved;
  return Do(commits ? "commit" : "abort").status();
}

absl::Status SoakWorker::Read(uint64_t sequence, uint64_t wait_ms) {
  const uint32_t length = LengthOf(sequence);
  const auto good =
      Do(absl::StrCat("get ", sequence, " ", length, " ", ++last_request_, " ", wait_ms));
  if (!good.ok()) return good.status();
  counts_.asked += length;
  counts_.compared += *good;
  return absl::OkStatus();
}

// What is pinned stays as it is, whatever happens meanwhile.
absl::Status SoakWorker::HoldAndRead(uint64_t sequence, bool damages) {
  const uint64_t request = ++last_request_;
  const auto acquired =
      Do(absl::StrCat("acquire ", sequence, " ", LengthOf(sequence), " ", request, " 500"));
  if (!acquired.ok()) return acquired.status();
  const auto before = Do(absl::StrCat("verify ", request));
  if (!before.ok()) return before.status();
  for (uint64_t i = random_() % 4; i > 0; --i) {
    const uint64_t other = 1 + random_() % kSequences;
    absl::Status status = random_() % 2 == 0 ? Write(other) : Read(other, 100);
    if (!status.ok()) return status;
  }
  const auto after = Do(absl::StrCat("verify ", request));
  if (!after.ok()) return after.status();
  if (*after != *before) {
    return absl::DataLossError(absl::StrCat("DATA_LOSS: of ", *before, " blocks that ", tenant_,
                                            " has pinned ", *after, " are what they were"));
  }
  counts_.asked += LengthOf(sequence);
  counts_.compared += *after;
  if (damages && random_() % 4 == 0) {
    const auto damaged = Do(absl::StrCat("damage ", request));
    if (!damaged.ok()) return damaged.status();
    counts_.damaged += *damaged;
  }
  if (random_() % 2 == 0) {
    const auto released = Do(absl::StrCat("release ", request));
    if (!released.ok()) return released.status();
  }
  return Do(absl::StrCat("end ", request)).status();
}

absl::Status SoakWorker::Hint(uint64_t sequence) {
  static constexpr const char* kKinds[] = {"prefetch", "demote", "release", "retain"};
  const char* const kind = kKinds[random_() % 4];
  const uint32_t length = LengthOf(sequence);
  const uint32_t first =
      kind == kKinds[0] ? 0 : static_cast<uint32_t>(random_() % (uint64_t{length} + 1));
  return Do(absl::StrCat("hint ", sequence, " ", length, " ", first, " ", kind)).status();
}

absl::Status SoakWorker::ReadBack() {
  for (uint64_t sequence = 1; sequence <= kSequences; ++sequence) {
    if (absl::Status status = Read(sequence, 2000); !status.ok()) return status;
  }
  return absl::OkStatus();
}

absl::Status SoakWorker::ProveRoom() {
  absl::Status failed;
  const bool proved = Eventually(
      [&] {
        const uint64_t sequence = ++last_proof_;
        absl::StatusOr<uint64_t> blocks = Do(absl::StrCat("put ", sequence, " 1"));
        if (blocks.ok() && *blocks == 1) {
          blocks = Do(absl::StrCat("get ", sequence, " 1 ", ++last_request_, " 0"));
        }
        failed = blocks.status();
        return !blocks.ok() || *blocks == 1;
      },
      kPatience);
  if (proved) return failed;
  return absl::InternalError(absl::StrCat("there is no room for ", tenant_, " any more"));
}

absl::Status SoakWorker::ReadNothing() {
  const uint64_t before = counts_.compared;
  if (absl::Status status = ReadBack(); !status.ok()) return status;
  if (counts_.compared == before) return absl::OkStatus();
  return absl::DataLossError(absl::StrCat(counts_.compared - before, " blocks of ", tenant_,
                                          " came back after they had been purged"));
}

}  // namespace palimpsest
