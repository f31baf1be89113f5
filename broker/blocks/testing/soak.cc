#include "broker/blocks/testing/soak.h"

#include <csignal>
#include <cstdio>
#include <iterator>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/time/clock.h"
#include "common/monotonic_time.h"

namespace palimpsest {
namespace {

// Everything is taken out after so many phases.
constexpr uint64_t kLeakPeriod = 6;
// What goes on in a phase happens so often.
constexpr int kBeats = 6;

}  // namespace

const std::vector<Soak::Trouble>& Soak::Troubles() {
  static const std::vector<Trouble> troubles = {
      {"nothing", &Soak::Calm, nullptr},
      {"workers killed", &Soak::Calm, &Soak::KillAWorker},
      {"broker killed", &Soak::StandStill, &Soak::KillTheBroker},
      {"bytes damaged", &Soak::Damage, &Soak::DamageFiles, true},
      {"limits and trims", &Soak::Calm, &Soak::Limits},
      {"errors of media", &Soak::Errors, nullptr},
      {"full media", &Soak::FullMedia, nullptr},
      {"slow media", &Soak::Slowness, nullptr},
      {"processes stopped", &Soak::Calm, &Soak::StopSomebody},
      {"no memory for T1", &Soak::NoMemory, &Soak::Limits},
      {"folder gone", &Soak::FolderGone, nullptr},
      {"peer killed", &Soak::PeerGone, nullptr},
      {"purges", &Soak::Purges, nullptr},
      {"errors, workers killed", &Soak::Errors, &Soak::KillAWorker},
      {"damage, broker killed", &Soak::Damage, &Soak::KillTheBroker, true},
  };
  return troubles;
}

Soak::Soak(const Options& options) : options_(options), random_(options.seed), node_(options.seed) {
  for (const std::string& tenant : SoakNode::Tenants()) {
    workers_.push_back(std::make_unique<SoakWorker>(node_, tenant, random_()));
  }
}

const std::string& Soak::Keep() {
  node_.Keep();
  return node_.folder();
}

absl::Status Soak::Run() {
  const absl::Time end = options_.time > absl::ZeroDuration() ? MonotonicNow() + options_.time
                                                              : absl::InfiniteFuture();
  if (absl::Status status = node_.Start(); !status.ok()) return status;
  for (const auto& worker : workers_) {
    if (absl::Status status = worker->Start(); !status.ok()) return status;
  }
  std::vector<const Trouble*> due;
  while ((options_.phases == 0 || phases_ < options_.phases) && MonotonicNow() < end) {
    // Each of them before one comes again.
    if (due.empty()) {
      for (const Trouble& trouble : Troubles()) due.push_back(&trouble);
    }
    const size_t next = Below(due.size());
    const Trouble& trouble = *due[next];
    due.erase(due.begin() + static_cast<ptrdiff_t>(next));
    ++phases_;
    if (absl::Status status = Phase(trouble); !status.ok()) {
      return absl::Status(status.code(), absl::StrCat("phase ", phases_, " (", trouble.name,
                                                      "): ", status.message()));
    }
  }
  if (absl::Status status = node_.CheckLeaks(); !status.ok()) return status;
  ++leak_checks_;
  Summarize();
  return absl::OkStatus();
}

absl::Status Soak::Phase(const Trouble& trouble) {
  const absl::Time start = MonotonicNow();
  if (absl::Status status = (this->*trouble.begin)(); !status.ok()) return status;
  if (absl::Status status = Work(trouble); !status.ok()) return status;
  if (absl::Status status = node_.Heal(); !status.ok()) return status;
  if (absl::Status status = LookAtEverything(); !status.ok()) return status;
  SoakCounts counts;
  for (const auto& worker : workers_) counts += worker->TakeCounts();
  counts_ += counts;
  absl::PrintF("%4d  %-24s %5.1f s  %6d operations, %6d blocks stored, %6d of %6d came\n", phases_,
               trouble.name, absl::ToDoubleSeconds(MonotonicNow() - start), counts.operations,
               counts.stored, counts.compared, counts.asked);
  std::fflush(stdout);
  return absl::OkStatus();
}

absl::Status Soak::Work(const Trouble& trouble) {
  std::atomic<bool> stop = false;
  std::vector<absl::Status> ended(workers_.size());
  std::vector<std::thread> threads;
  for (size_t i = 0; i < workers_.size(); ++i) {
    threads.emplace_back([&, i] { ended[i] = workers_[i]->Run(stop, trouble.damages); });
  }
  const absl::Duration beat = options_.phase * (0.3 + 0.7 * static_cast<double>(Below(100)) / 100) /
                              static_cast<double>(kBeats);
  absl::Status went_on;
  for (int i = 0; i < kBeats; ++i) {
    absl::SleepFor(beat);
    if (trouble.goes_on != nullptr && went_on.ok()) went_on = (this->*trouble.goes_on)();
  }
  stop = true;
  for (const auto& worker : workers_) worker->Signal(SIGCONT);
  node_.SignalPeer(SIGCONT);
  if (!node_.broker_down()) node_.SignalBroker(SIGCONT);
  for (std::thread& thread : threads) thread.join();
  for (const absl::Status& status : ended) {
    if (!status.ok()) return status;
  }
  return went_on;
}

absl::Status Soak::LookAtEverything() {
  if (absl::Status status = node_.CheckLedger(); !status.ok()) return status;
  // Those that were killed, or whose broker was: what they left must not be in the way of others.
  for (const auto& worker : workers_) {
    if (absl::Status status = worker->Refresh(); !status.ok()) return status;
  }
  std::vector<absl::Status> ended(workers_.size());
  std::vector<std::thread> threads;
  for (size_t i = 0; i < workers_.size(); ++i) {
    threads.emplace_back([&, i] {
      ended[i] = workers_[i]->ReadBack();
      if (ended[i].ok()) ended[i] = workers_[i]->ProveRoom();
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (const absl::Status& status : ended) {
    if (!status.ok()) return status;
  }
  // What was slow until now may have opened a breaker once more.
  if (!node_.CheckTiers().ok()) {
    if (absl::Status status = node_.AwaitServing(); !status.ok()) return status;
    if (absl::Status status = node_.CheckTiers(); !status.ok()) return status;
  }
  if (phases_ % kLeakPeriod == 0) {
    ++leak_checks_;
    return node_.CheckLeaks();
  }
  return node_.CheckLedger();
}

void Soak::Summarize() const {
  absl::PrintF(
      "%d phases: %d operations, %d blocks stored, %d of %d that were asked for came, each with "
      "its "
      "bytes;\n%d brokers and %d workers killed, %d bytes damaged in T1 and %d in files; all taken "
      "out %d times, and nothing left\n",
      phases_, counts_.operations, counts_.stored, counts_.compared, counts_.asked, brokers_killed_,
      workers_killed_, counts_.damaged, bytes_damaged_, leak_checks_);
}

// Some of the tiers fare so.
absl::Status Soak::TellSome(const std::string& faults) {
  const auto& tiers = SoakNode::LowerTiers();
  const uint64_t chosen = 1 + Below((uint64_t{1} << tiers.size()) - 1);
  for (size_t i = 0; i < tiers.size(); ++i) {
    if ((chosen >> i & 1) == 0) continue;
    if (absl::Status status = node_.Tell(absl::StrCat("faults ", tiers[i], " ", faults));
        !status.ok()) {
      return status;
    }
  }
  return absl::OkStatus();
}

absl::Status Soak::Errors() {
  return TellSome(Below(3) == 0 ? "failed_reads=1 failed_writes=1"
                                : "failed_reads=0.1 failed_writes=0.1");
}

absl::Status Soak::FullMedia() { return TellSome("full_writes=0.9"); }

absl::Status Soak::Damage() {
  return TellSome("damaged_reads=0.05 damaged_writes=0.05 torn_writes=0.05");
}

absl::Status Soak::Slowness() {
  return TellSome(absl::StrCat("late=0.3 delay_ms=", 50 + Below(2500)));
}

absl::Status Soak::NoMemory() { return node_.Tell("memory refused"); }

absl::Status Soak::FolderGone() {
  node_.RemoveFolder();
  return absl::OkStatus();
}

absl::Status Soak::PeerGone() {
  node_.KillPeer();
  return absl::OkStatus();
}

// What was purged is gone, in every tier.
absl::Status Soak::Purges() {
  SoakWorker& worker = *workers_[Below(workers_.size())];
  if (absl::Status status = node_.Purge(worker.tenant()); !status.ok()) return status;
  return worker.ReadNothing();
}

// Some transfers do not end any more.
absl::Status Soak::StandStill() {
  const auto& tiers = SoakNode::LowerTiers();
  return node_.Tell(
      absl::StrCat("hold ", tiers[Below(tiers.size())], Below(2) == 0 ? " read" : " written"));
}

absl::Status Soak::DamageFiles() {
  bytes_damaged_ += static_cast<uint64_t>(node_.DamageFiles(random_(), 8));
  return absl::OkStatus();
}

absl::Status Soak::Limits() {
  static constexpr v1::Tier kTiers[] = {v1::TIER_DRAM, v1::TIER_CXL, v1::TIER_REMOTE, v1::TIER_NVME,
                                        v1::TIER_DIRECTORY};
  const std::string& tenant = SoakNode::Tenants()[Below(SoakNode::Tenants().size())];
  const uint64_t bytes = Below(5) << 20;
  if (Below(2) == 0) return node_.SetLimit(v1::TIER_DRAM, tenant, bytes);
  return node_.Trim(kTiers[Below(std::size(kTiers))], tenant, bytes);
}

// For less than whoever waits for them has patience.
absl::Status Soak::StopSomebody() {
  const uint64_t who = Below(workers_.size() + 2);
  const auto signal = [&](int number) {
    if (who < workers_.size()) workers_[who]->Signal(number);
    if (who == workers_.size()) node_.SignalBroker(number);
    if (who == workers_.size() + 1) node_.SignalPeer(number);
  };
  signal(SIGSTOP);
  absl::SleepFor(absl::Milliseconds(50 + Below(700)));
  signal(SIGCONT);
  return absl::OkStatus();
}

absl::Status Soak::KillAWorker() {
  if (Below(2) == 0) return absl::OkStatus();
  ++workers_killed_;
  workers_[Below(workers_.size())]->Kill();
  return absl::OkStatus();
}

// Once in a phase, at any of its beats.
absl::Status Soak::KillTheBroker() {
  if (broker_killed_in_ == phases_ || Below(kBeats / 2) > 0) return absl::OkStatus();
  broker_killed_in_ = phases_;
  ++brokers_killed_;
  node_.KillBroker();
  return node_.StartBroker();
}

}  // namespace palimpsest
