#include "tools/gpu_check/gpu_worker.h"

#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "common/cuda/context.h"
#include "common/monotonic_time.h"
#include "common/mutex.h"
#include "common/slab_checksum.h"
#include "worker/memory/cuda/cuda_memory.h"
#include "worker/memory/grpc_memory_client.h"

namespace palimpsest {
namespace {

using Words = std::vector<std::string>;
constexpr absl::Duration kPatience = absl::Seconds(30);

class GpuWorker {
 public:
  absl::StatusOr<std::string> Obey(const Words& words) {
    const std::string& command = words[0];
    uint32_t number = 0;
    if (words.size() > 1) (void)absl::SimpleAtoi(words[1], &number);
    if (command == "connect") return Connect(words);
    if (command == "target") {
      client_->SetKvTarget(static_cast<int32_t>(number), static_cast<int32_t>(number));
      return "";
    }
    if (command == "await") {
      auto answer = AwaitThat([&] { return kv_.size() == number; });
      return answer.ok() ? absl::StrCat(absl::ToUnixMicros(MonotonicNow())) : answer;
    }
    if (command == "grow") {
      uint32_t step = 0;
      if (words.size() != 3 || !absl::SimpleAtoi(words[2], &step) || step == 0) {
        return absl::InvalidArgumentError("grow needs two numbers");
      }
      return Grow(number, step);
    }
    if (command == "fill") return OnEach([&] { return Fill(number); });
    if (command == "holds") return OnEach([&] { return Holds(number); });
    if (command == "release") {
      const absl::Time start = MonotonicNow();
      client_->SetKvTarget(0, 0);
      client_->ReleaseKv(kv_);
      kv_.clear();
      return absl::StrCat(absl::ToUnixMicros(start));
    }
    if (command == "activate") {
      client_->RequestActivation(ActivationReason::kRequest);
      return AwaitThat([&] { return client_->Mapped().parameters == client_->Mapped().image; });
    }
    if (command == "parameters") return OnEach([this] { return Parameters(); });
    if (command == "workspace") return OnEach([this] { return Workspace(); });
    if (command == "reattached") return AwaitThat([&] { return reattached_; });
    return absl::UnimplementedError(command);
  }

 private:
  absl::StatusOr<std::string> Connect(const Words& words) {
    if (words.size() != 6) return absl::InvalidArgumentError("connect needs five words");
    std::vector<int> gpus;
    for (absl::string_view number : absl::StrSplit(words[5], ',')) {
      if (!absl::SimpleAtoi(number, &gpus.emplace_back()))
        return absl::InvalidArgumentError(number);
    }
    const auto driver = CudaDriver::Load();
    if (!driver.ok()) return driver.status();
    auto memory = CudaMemory::Open({.driver = *driver, .gpus = gpus});
    if (!memory.ok()) return memory.status();
    memory_ = *std::move(memory);
    for (int rank = 0; rank < memory_->ranks(); ++rank) {
      if (absl::Status status = Use(rank); !status.ok()) return status;
      auto stream = CudaStream::Create(memory_->context(rank));
      if (!stream.ok()) return stream.status();
      streams_.push_back(*std::move(stream));
    }
    GrpcMemoryClient::Options options;
    options.connection.address = words[1];
    options.connection.descriptor_socket = words[2];
    options.connection.tenant = words[3];
    options.connection.secret = words[4];
    options.backend = memory_.get();
    auto client = GrpcMemoryClient::Connect(std::move(options));
    if (!client.ok()) return client.status();
    client_ = *std::move(client);
    absl::Status allocated =
        (*driver)->Check((*driver)->cuMemHostAlloc(reinterpret_cast<void**>(&words_), SlabSize(),
                                                   CU_MEMHOSTALLOC_PORTABLE),
                         "allocating host memory to read into");
    if (!allocated.ok()) return allocated;
    client_->SetWakeup([this] {
      MutexLock lock(&mu_);
      woken_ = true;
      changed_.SignalAll();
    });
    client_->SendReport({.active = true});
    return absl::StrCat(client_->workspace_bytes().count());
  }

  void Take() {
    for (const MemoryEvent& event : client_->TakeEvents()) {
      if (const auto* mapped = std::get_if<KvMapped>(&event)) {
        kv_.insert(kv_.end(), mapped->indexes.begin(), mapped->indexes.end());
      } else if (const auto* parameters = std::get_if<ParametersRevoked>(&event)) {
        client_->FinishParameterRevoke(parameters->id);
      } else if (const auto* slabs = std::get_if<KvRevoked>(&event)) {
        const size_t count = std::min<size_t>(kv_.size(), static_cast<size_t>(slabs->slabs));
        client_->FinishKvRevoke(slabs->id, absl::MakeConstSpan(kv_).last(count));
        kv_.resize(kv_.size() - count);
      } else if (const auto* connected = std::get_if<BrokerConnected>(&event)) {
        reattached_ = reattached_ || connected->reattached;
      }
    }
  }

  absl::StatusOr<std::string> AwaitThat(const std::function<bool()>& holds) {
    const absl::Time deadline = MonotonicNow() + kPatience;
    while (true) {
      {
        MutexLock lock(&mu_);
        woken_ = false;
      }
      Take();
      if (holds()) return "";
      MutexLock lock(&mu_);
      while (!woken_) {
        // Restored slabs are counted without an event.
        if (changed_.WaitWithTimeout(&mu_, absl::Milliseconds(2))) break;
      }
      if (MonotonicNow() > deadline) {
        return absl::DeadlineExceededError(absl::StrCat("holds ", kv_.size(), " KV slabs"));
      }
    }
  }

  absl::StatusOr<std::string> Grow(uint32_t slabs, uint32_t step) {
    const absl::Time start = MonotonicNow();
    while (kv_.size() < slabs) {
      const size_t target = std::min<size_t>(slabs, kv_.size() + step);
      client_->SetKvTarget(static_cast<int32_t>(target), static_cast<int32_t>(target));
      auto answer = AwaitThat([&] { return kv_.size() == target; });
      if (!answer.ok()) return answer;
    }
    return absl::StrCat(absl::ToInt64Microseconds(MonotonicNow() - start));
  }

  // The GPU that the calls below are about.
  absl::Status Use(int rank) {
    rank_ = rank;
    return memory_->context(rank)->MakeCurrent();
  }
  const CudaStream& stream() const { return streams_[static_cast<size_t>(rank_)]; }
  CUdeviceptr At(RegionIndex index) const {
    return reinterpret_cast<CUdeviceptr>(client_->kv(rank_) +
                                         (client_->slab_bytes() * index.value()).count());
  }
  size_t SlabSize() const { return static_cast<size_t>(client_->slab_bytes().count()); }

  // `work` on each GPU; the first answer that is neither empty nor "yes".
  absl::StatusOr<std::string> OnEach(const std::function<absl::StatusOr<std::string>()>& work) {
    absl::StatusOr<std::string> answer = "";
    for (int rank = 0; rank < memory_->ranks(); ++rank) {
      if (absl::Status status = Use(rank); !status.ok()) return status;
      answer = work();
      if (!answer.ok()) return answer;
      if (!answer->empty() && *answer != "yes") return absl::StrCat("rank ", rank, ": ", *answer);
    }
    return answer;
  }

  absl::StatusOr<std::string> Set(CUdeviceptr at, size_t bytes, uint32_t value) {
    const CudaDriver& driver = memory_->context(rank_)->driver();
    absl::Status status =
        driver.Check(driver.cuMemsetD32Async(at, value, bytes / 4, stream().get()), "filling");
    if (!status.ok()) return status;
    return "";
  }

  // One slab's words; they stay until the next call.
  absl::StatusOr<absl::Span<const uint32_t>> Get(CUdeviceptr at) {
    const CudaDriver& driver = memory_->context(rank_)->driver();
    absl::Status status =
        driver.Check(driver.cuMemcpyDtoHAsync(words_, at, SlabSize(), stream().get()), "reading");
    if (status.ok()) status = stream().Synchronize();
    if (!status.ok()) return status;
    return absl::MakeConstSpan(words_, SlabSize() / sizeof(uint32_t));
  }

  // "yes", or where a slab has another word.
  absl::StatusOr<std::string> AllAre(CUdeviceptr slab, uint32_t value) {
    const auto words = Get(slab);
    if (!words.ok()) return words.status();
    const auto other =
        std::find_if(words->begin(), words->end(), [value](uint32_t w) { return w != value; });
    if (other == words->end()) return "yes";
    return absl::StrCat("word ", other - words->begin(), " is ", *other);
  }

  absl::StatusOr<std::string> Fill(uint32_t value) {
    for (const RegionIndex index : kv_) {
      auto set = Set(At(index), SlabSize(), value);
      if (!set.ok()) return set;
    }
    if (absl::Status status = stream().Synchronize(); !status.ok()) return status;
    return "";
  }

  absl::StatusOr<std::string> Holds(uint32_t value) {
    for (const RegionIndex index : kv_) {
      auto answer = AllAre(At(index), value);
      if (!answer.ok()) return answer;
      if (*answer != "yes") return absl::StrCat("place ", index.ToString(), ": ", *answer);
    }
    return "yes";
  }

  absl::StatusOr<std::string> Parameters() {
    const v1::ImageManifest& manifest = client_->manifest();
    const auto at = reinterpret_cast<CUdeviceptr>(client_->parameters(rank_));
    const int slabs = manifest.slab_checksums_size() / client_->ranks();
    for (int i = 0; i < slabs; ++i) {
      const auto words = Get(at + static_cast<size_t>(i) * SlabSize());
      if (!words.ok()) return words.status();
      const absl::Span<const std::byte> bytes(reinterpret_cast<const std::byte*>(words->data()),
                                              SlabSize());
      if (SlabChecksum(bytes) != manifest.slab_checksums(rank_ * slabs + i)) {
        return absl::StrCat("not slab ", i);
      }
    }
    return "yes";
  }

  absl::StatusOr<std::string> Workspace() {
    const auto at = reinterpret_cast<CUdeviceptr>(client_->workspace(rank_));
    const auto bytes = static_cast<size_t>(client_->workspace_bytes().count());
    if (auto set = Set(at, bytes, 0xabcdef); !set.ok()) return set;
    for (size_t slab = 0; slab < bytes; slab += SlabSize()) {
      auto answer = AllAre(at + slab, 0xabcdef);
      if (!answer.ok() || *answer != "yes") return answer;
    }
    return "yes";
  }

  std::unique_ptr<CudaMemory> memory_;
  int rank_ = 0;
  std::vector<CudaStream> streams_;
  uint32_t* words_ = nullptr;  // pinned; room for a slab
  std::unique_ptr<GrpcMemoryClient> client_;
  std::vector<RegionIndex> kv_;
  bool reattached_ = false;

  Mutex mu_;
  CondVar changed_;
  bool woken_ ABSL_GUARDED_BY(mu_) = false;
};

}  // namespace

void RunGpuWorker() {
  GpuWorker worker;
  FILE* const commands = fdopen(3, "r");
  FILE* const answers = fdopen(4, "w");
  char line[4096];
  while (commands != nullptr && answers != nullptr && fgets(line, sizeof line, commands)) {
    std::string text(line);
    if (!text.empty() && text.back() == '\n') text.pop_back();
    const auto answer = worker.Obey(absl::StrSplit(text, ' '));
    const std::string out =
        answer.ok() ? absl::StrCat("ok ", *answer, "\n")
                    : absl::StrCat("error ", absl::StatusCodeToString(answer.status().code()), " ",
                                   answer.status().message(), "\n");
    fputs(out.c_str(), answers);
    fflush(answers);
  }
  // Without destructors, as if killed.
  _exit(0);
}

}  // namespace palimpsest
