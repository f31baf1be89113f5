// How fast memory moves on one node, beside memcpy in the same run: see --help and kMethod.
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "broker/server/testing/control_latency.h"
#include "common/file.h"
#include "common/monotonic_time.h"
#include "tests/benchmark/memory_copy.h"
#include "tests/benchmark/memory_node.h"

namespace palimpsest {
namespace {

constexpr const char* kMethod =
    R"(Runs a broker process and, in this process, the memory clients of three tenants: alpha (verifies
what it restores) and gamma (does not), both with the model, and beta (takes KV slabs). Each round,
for alpha and then for gamma:
  restore  the model's whole image, from the arrival of the grant (all slabs free before) until its
           last stage may be read: fetch descriptors, map, copy, hash;
  remap    its parameter slabs to beta as KV slabs (all but the few that beta's own, tiny image
           keeps room for), from the broker's receipt of the revoke's answer until beta's engine is
           told that the last one is mapped: retire (truncate, fresh zeroed memory), grant, fetch
           descriptors, map.
Beside each, memcpy of the same number of bytes between two sets of slabs like the broker's, mapped
and faulted in before, slab by slab: on 1 thread and on as many as a restore uses; the mean of a
copy before and one after. Ratios are taken within a round. On a loaded machine ratios by time can
flatter: judge by those to the best memcpy of the run and by those of processor time, which count
all processes. Steps of a remap overlap: what is fetched and mapped while other slabs are still
being retired does not add to its time. Control latency: round trips to a broker in this process.)";

struct Settings {
  std::string model;
  std::string json;
  int rounds = 9;
  int restore_threads = 2;
  int control_rounds = 5000;
};

// Medians and spread of one quantity over the rounds.
using Samples = std::map<std::string, std::vector<double>>;

double Quantile(std::vector<double> values, double q) {
  std::sort(values.begin(), values.end());
  return values[static_cast<size_t>(std::lround(q * static_cast<double>(values.size() - 1)))];
}

absl::Duration ProcessCpu() {
  timespec time = {};
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &time);
  return absl::DurationFromTimespec(time);
}

class Benchmark {
 public:
  explicit Benchmark(const Settings& settings) : settings_(settings) {}

  absl::Status Run() {
    std::fprintf(stderr, "starting a broker, packing %s ...\n", settings_.model.c_str());
    absl::StatusOr<std::unique_ptr<MemoryNode>> node =
        MemoryNode::Start({.model = settings_.model,
                           .broker = "broker/server/palimpsest-broker",
                           .packer = "worker/model/packer"});
    if (!node.ok()) return node.status();
    node_ = *std::move(node);
    image_ = static_cast<size_t>(node_->image_slabs());
    auto copy = MemoryCopy::Create(node_->image_slabs());
    if (!copy.ok()) return copy.status();
    copy_ = *std::move(copy);
    auto alpha = node_->Connect("alpha", /*verify=*/true, settings_.restore_threads);
    if (!alpha.ok()) return alpha.status();
    auto gamma = node_->Connect("gamma", /*verify=*/false, settings_.restore_threads);
    if (!gamma.ok()) return gamma.status();
    auto beta = node_->Connect("beta", /*verify=*/true, settings_.restore_threads);
    if (!beta.ok()) return beta.status();
    beta_ = *std::move(beta);
    // What the pool has beyond one image.
    beta_->client().SetKvTarget(kExtra, kExtra);
    if (const auto held = beta_->AwaitKv(kExtra); !held.ok()) return held.status();
    // The first round warms up and does not count.
    for (int round = 0; round <= settings_.rounds; ++round) {
      absl::Status status = Round("alpha", **alpha, "verified");
      if (status.ok()) status = Round("gamma", **gamma, "unverified");
      if (!status.ok()) return status;
      if (round == 0) samples_.clear();
      Progress(round);
    }
    return absl::OkStatus();
  }

  absl::Status RunControl() {
    std::fprintf(stderr, "measuring control round trips ...\n");
    auto latencies = MeasureControlLatency(settings_.control_rounds);
    if (!latencies.ok()) return latencies.status();
    control_ = *std::move(latencies);
    return absl::OkStatus();
  }

  // Call once, after Run.
  void AddStrictRatios() {
    double best = 0;
    for (const auto& [name, values] : samples_) {
      if (name.starts_with("memcpy") && name.ends_with("GB/s")) {
        best = std::max(best, *std::max_element(values.begin(), values.end()));
      }
    }
    for (const char* name : {"remap", "restore verified", "restore unverified"}) {
      for (const double rate : samples_.at(absl::StrCat(name, ", GB/s"))) {
        Add(absl::StrCat(name, " / best memcpy of the run"), rate / best);
      }
    }
  }

  void Print() const {
    std::printf("%zu slabs of 2 MiB (%s), %d rounds, %u processors, load %.1f; GB = 1e9 bytes\n\n",
                image_, copy_->huge_pages() ? "huge pages" : "small pages", settings_.rounds,
                std::thread::hardware_concurrency(), LoadAverage());
    std::printf("| %-44s | median | 10%% .. 90%% |\n|---|---|---|\n", "quantity");
    for (const auto& [name, values] : samples_) {
      std::printf("| %-44s | %.4g | %.4g .. %.4g |\n", name.c_str(), Quantile(values, 0.5),
                  Quantile(values, 0.1), Quantile(values, 0.9));
    }
    for (const ControlLatency& latency : control_) {
      std::printf("| %-44s | p50 %.0f us | p99 %.0f us |\n", latency.name.c_str(),
                  absl::ToDoubleMicroseconds(latency.p50), absl::ToDoubleMicroseconds(latency.p99));
    }
  }

  nlohmann::json Json() const {
    nlohmann::json out = {{"slabs", image_},
                          {"slab_bytes", MiB(2).count()},
                          {"rounds", settings_.rounds},
                          {"restore_threads", settings_.restore_threads},
                          {"processors", std::thread::hardware_concurrency()},
                          {"load_average", LoadAverage()},
                          {"huge_pages", copy_->huge_pages()},
                          {"method", kMethod}};
    for (const auto& [name, values] : samples_) {
      out["quantities"][name] = {{"median", Quantile(values, 0.5)},
                                 {"p10", Quantile(values, 0.1)},
                                 {"p90", Quantile(values, 0.9)},
                                 {"samples", values}};
    }
    for (const ControlLatency& latency : control_) {
      out["control"][latency.name] = {{"p50_us", absl::ToDoubleMicroseconds(latency.p50)},
                                      {"p99_us", absl::ToDoubleMicroseconds(latency.p99)}};
    }
    return out;
  }

 private:
  static constexpr int kExtra = 16;

  struct Copies {
    MemoryCopy::Time one;
    MemoryCopy::Time many;
  };

  static double LoadAverage() {
    double load = 0;
    return getloadavg(&load, 1) == 1 ? load : 0;
  }

  void Add(const std::string& name, double value) { samples_[name].push_back(value); }

  Copies Copy() { return {copy_->Run(1), copy_->Run(settings_.restore_threads)}; }

  // Bandwidth and ratios to the copies before and after.
  void AddRate(const std::string& name, int slabs, absl::Duration wall, absl::Duration cpu,
               const Copies& before, const Copies& after) {
    const auto bytes = static_cast<double>((MiB(2) * slabs).count());
    const double share = bytes / static_cast<double>(copy_->bytes().count());
    const absl::Duration one = (before.one.wall + after.one.wall) * (share / 2);
    const absl::Duration many = (before.many.wall + after.many.wall) * (share / 2);
    const absl::Duration many_cpu = (before.many.cpu + after.many.cpu) * (share / 2);
    const std::string threads = absl::StrCat(settings_.restore_threads, " threads");
    Add("memcpy 1 thread, GB/s", bytes / absl::ToDoubleSeconds(one) / 1e9);
    Add("memcpy " + threads + ", GB/s", bytes / absl::ToDoubleSeconds(many) / 1e9);
    Add("memcpy " + threads + ", CPU ms", absl::ToDoubleMilliseconds(many_cpu));
    Add(name + ", ms", absl::ToDoubleMilliseconds(wall));
    Add(name + ", GB/s", bytes / absl::ToDoubleSeconds(wall) / 1e9);
    Add(name + " / memcpy 1 thread", absl::FDivDuration(one, wall));
    Add(name + " / memcpy " + threads, absl::FDivDuration(many, wall));
    Add(name + ", CPU ms", absl::ToDoubleMilliseconds(cpu));
    Add(name + " / memcpy, by CPU time", absl::FDivDuration(many_cpu, cpu));
  }

  absl::Duration Cpu() const { return ProcessCpu() + node_->broker_cpu(); }

  absl::Status Round(const std::string& name, MemoryTenant& victim, const std::string& kind) {
    absl::Status status = node_->AwaitSettled(static_cast<uint32_t>(image_));
    const Copies before = Copy();
    if (status.ok()) status = Restore(victim, kind, before);
    if (status.ok()) status = Remap(name, victim);
    return status;
  }

  absl::Status Restore(MemoryTenant& victim, const std::string& kind, const Copies& before) {
    const MemoryTenant::Spent spent = victim.spent();
    const absl::Duration cpu = Cpu();
    const absl::StatusOr<absl::Time> granted = victim.Activate();
    if (!granted.ok()) return granted.status();
    absl::Time first;
    for (int stage = 0; stage < victim.stages(); ++stage) {
      if (absl::Status status = victim.client().gate().AwaitStage(stage); !status.ok()) {
        return status;
      }
      if (stage == 0) first = MonotonicNow();
    }
    const absl::Duration wall = MonotonicNow() - *granted;
    const absl::Duration used = Cpu() - cpu;
    // The histograms are filled when the broker is told.
    if (absl::Status status = node_->AwaitSettled(0); !status.ok()) return status;
    copies_ = Copy();
    const std::string name = "restore " + kind;
    AddRate(name, node_->image_slabs(), wall, used, before, copies_);
    const MemoryTenant::Spent now = victim.spent();
    const absl::Duration fetch = now.fetch_parameters - spent.fetch_parameters;
    Add(name + ": first stage open, ms", absl::ToDoubleMilliseconds(first - *granted));
    Add(name + ": fetch, ms", absl::ToDoubleMilliseconds(fetch));
    Add(name + ": map, ms",
        absl::ToDoubleMilliseconds(now.map_parameters - spent.map_parameters - fetch));
    Add(name + ": copy and hash, ms", absl::ToDoubleMilliseconds(now.restore - spent.restore));
    return absl::OkStatus();
  }

  absl::Status Remap(const std::string& name, MemoryTenant& victim) {
    const Copies before = copies_;
    const MemoryTenant::Spent spent = beta_->spent();
    const absl::Duration cpu = Cpu();
    const absl::Time start = MonotonicNow();
    const int remapped = node_->remapped_slabs();
    const int32_t target = kExtra + remapped;
    beta_->client().SetKvTarget(target, target);
    const absl::StatusOr<absl::Time> mapped = beta_->AwaitKv(static_cast<size_t>(target));
    if (!mapped.ok()) return mapped.status();
    const absl::Duration used = Cpu() - cpu;
    if (absl::Status status = node_->AwaitSettled(0); !status.ok()) return status;
    const absl::StatusOr<v1::GetStatusResponse> status = node_->Status();
    if (!status.ok()) return status.status();
    const MemoryTenant::Spent now = beta_->spent();
    beta_->ReleaseKvDownTo(kExtra);
    if (absl::Status free = node_->AwaitSettled(static_cast<uint32_t>(image_)); !free.ok()) {
      return free;
    }
    copies_ = Copy();

    absl::Time acknowledged = absl::InfinitePast();
    absl::Time retired = absl::InfinitePast();  // as many as are remapped
    uint32_t retired_slabs = 0;
    int grants = 0;
    for (const v1::Transfer& transfer : status->transfers()) {
      const absl::Time finished = absl::UnixEpoch() + absl::Seconds(transfer.finished_at());
      if (finished < start) continue;
      if (transfer.kind() == v1::Transfer::KIND_REVOKE && transfer.tenant() == name) {
        acknowledged = std::max(acknowledged, finished);
      } else if (transfer.kind() == v1::Transfer::KIND_SCRUB && transfer.tenant() == name) {
        if (retired_slabs < static_cast<uint32_t>(remapped)) retired = finished;
        retired_slabs += transfer.slabs();
      } else if (transfer.kind() == v1::Transfer::KIND_GRANT && transfer.tenant() == "beta") {
        ++grants;
      }
    }
    AddRate("remap", remapped, *mapped - acknowledged, used, before, copies_);
    Add("remap: ack to last slab retired, ms", absl::ToDoubleMilliseconds(retired - acknowledged));
    Add("remap: last slab retired to mapped, ms", absl::ToDoubleMilliseconds(*mapped - retired));
    const absl::Duration fetch = now.fetch_kv - spent.fetch_kv;
    Add("remap: grants", grants);
    Add("remap: fetch, ms in all", absl::ToDoubleMilliseconds(fetch));
    Add("remap: map, ms in all", absl::ToDoubleMilliseconds(now.map_kv - spent.map_kv - fetch));
    Add("remap: unmap before ack, ms",
        absl::ToDoubleMilliseconds(acknowledged - victim.answered()));
    return absl::OkStatus();
  }

  void Progress(int round) const {
    if (round == 0) {
      std::fprintf(stderr, "warmed up\n");
      return;
    }
    const auto last = [this](const char* name) { return samples_.at(name).back(); };
    std::fprintf(stderr, "round %d of %d: memcpy %.1f, remap %.1f, restore %.1f GB/s\n", round,
                 settings_.rounds, last("memcpy 1 thread, GB/s"), last("remap, GB/s"),
                 last("restore verified, GB/s"));
  }

  const Settings settings_;
  std::unique_ptr<MemoryNode> node_;
  std::unique_ptr<MemoryCopy> copy_;
  std::unique_ptr<MemoryTenant> beta_;
  size_t image_ = 0;
  Copies copies_;  // the latest
  Samples samples_;
  std::vector<ControlLatency> control_;
};

absl::Status RunBenchmark(const Settings& settings) {
  if (!std::filesystem::exists(settings.model + "/config.json")) {
    return absl::NotFoundError(absl::StrCat("no model in ", settings.model,
                                            ": run tools/quickstart once, or pass --model FOLDER"));
  }
  Benchmark benchmark(settings);
  if (absl::Status status = benchmark.Run(); !status.ok()) return status;
  benchmark.AddStrictRatios();
  if (absl::Status status = benchmark.RunControl(); !status.ok()) return status;
  benchmark.Print();
  if (settings.json.empty()) return absl::OkStatus();
  return WriteFileAtomically(settings.json, benchmark.Json().dump(2) + "\n");
}

}  // namespace
}  // namespace palimpsest

int main(int argc, char** argv) {
  palimpsest::Settings settings;
  const char* const home = std::getenv("HOME");
  settings.model =
      absl::StrCat(home == nullptr ? "" : home, "/.cache/palimpsest/models/SmolLM2-135M-Instruct");
  CLI::App app(std::string("Measures remapping, restoring and control round trips.\n\n") +
               palimpsest::kMethod);
  app.add_option("--model", settings.model, "Hugging Face folder of the model")
      ->capture_default_str();
  app.add_option("--rounds", settings.rounds, "rounds that count")
      ->check(CLI::Range(1, 1000))
      ->capture_default_str();
  app.add_option("--restore-threads", settings.restore_threads, "threads of a restore")
      ->check(CLI::Range(1, 64))
      ->capture_default_str();
  app.add_option("--control-rounds", settings.control_rounds, "round trips of each kind")
      ->check(CLI::Range(100, 1000000))
      ->capture_default_str();
  app.add_option("--json", settings.json, "write all samples to this file");
  CLI11_PARSE(app, argc, argv);
  // The executables lie in this one's runfiles; what was named lies elsewhere.
  for (std::string* path : {&settings.model, &settings.json}) {
    if (!path->empty()) *path = std::filesystem::absolute(*path);
  }
  std::error_code error;
  const std::string self = std::filesystem::read_symlink("/proc/self/exe", error);
  std::filesystem::current_path(self + ".runfiles/palimpsest", error);
  if (error) {
    std::cerr << "no runfiles beside " << self << ": build it with Bazel and run it there\n";
    return EXIT_FAILURE;
  }
  const absl::Status status = palimpsest::RunBenchmark(settings);
  if (status.ok()) return EXIT_SUCCESS;
  std::cerr << status.ToString() << "\n";
  return EXIT_FAILURE;
}
