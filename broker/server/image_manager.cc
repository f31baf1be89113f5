#include "broker/server/image_manager.h"

#include <dirent.h>
#include <sys/stat.h>

#include <algorithm>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "common/log.h"
#include "common/mapping.h"
#include "common/monotonic_time.h"
#include "worker/model/fingerprint.h"
#include "worker/model/image_builder.h"
#include "worker/model/image_checksums.h"
#include "worker/model/image_layout.h"
#include "worker/model/manifest.h"
#include "worker/model/model_config.h"
#include "worker/model/parallel.h"
#include "worker/model/tensor_parallel.h"

namespace palimpsest {
namespace {

constexpr int kSourceTries = 3;
// What a core makes huge pages of at a time.
constexpr Bytes kCollapsed = MiB(256);

// Name, inode, size and times of every file in the folder: equal only if nothing was written to it.
absl::StatusOr<std::string> FolderSignature(const std::string& folder) {
  DIR* const directory = opendir(folder.c_str());
  if (directory == nullptr) return ErrnoStatus(absl::StrCat("open the model folder ", folder));
  std::vector<std::string> files;
  while (const dirent* const entry = readdir(directory)) {
    const std::string path = absl::StrCat(folder, "/", entry->d_name);
    struct stat file;
    if (stat(path.c_str(), &file) != 0 || !S_ISREG(file.st_mode)) continue;
    files.push_back(absl::StrCat(entry->d_name, "/", file.st_dev, ":", file.st_ino, ":",
                                 file.st_size, ":", file.st_mtim.tv_sec, ".", file.st_mtim.tv_nsec,
                                 ":", file.st_ctim.tv_sec, ".", file.st_ctim.tv_nsec, "\n"));
  }
  closedir(directory);
  std::sort(files.begin(), files.end());
  std::string signature;
  for (const std::string& file : files) signature += file;
  return signature;
}

std::vector<ParameterStage> StagesOf(const v1::ImageManifest& manifest) {
  std::vector<ParameterStage> stages;
  for (const v1::ImageStage& stage : manifest.stages()) {
    stages.push_back(ParameterStage{stage.first_slab(), stage.slab_count(),
                                    absl::StartsWith(stage.name(), "layer.")});
  }
  return stages;
}

}  // namespace

absl::StatusOr<v1::ImageManifest> PlanImage(const TenantModel& model, Bytes slab_bytes,
                                            WeightFormat format, int32_t ranks) {
  const absl::StatusOr<ModelConfig> whole = ReadModelConfig(model.folder);
  if (!whole.ok()) return whole.status();
  absl::StatusOr<ModelConfig> config = RankConfig(*whole, ranks);
  if (!config.ok()) return config.status();
  config->kv_dtype = model.kv_dtype;
  const absl::StatusOr<ImageLayout> layout = LayOutImage(*config, slab_bytes, format);
  if (!layout.ok()) return layout.status();
  return MakeManifest(*config, *layout, model.kv_block_tokens, model.max_sequence_tokens);
}

ImageJob::View ImageJob::Await(uint64_t seen, absl::Duration timeout) {
  const absl::Time deadline = MonotonicNow() + timeout;
  MutexLock lock(&mu_);
  while (view_.version == seen) {
    if (changed_.WaitWithDeadline(&mu_, deadline)) break;
  }
  return view_;
}

void ImageJob::Progress(absl::string_view phase, Bytes done, Bytes total) {
  MutexLock lock(&mu_);
  view_.phase = std::string(phase);
  view_.done = done;
  view_.total = total;
  ++view_.version;
  changed_.SignalAll();
}

void ImageJob::Finish(absl::StatusOr<std::shared_ptr<const SealedImage>> result) {
  MutexLock lock(&mu_);
  view_.finished = true;
  view_.result = std::move(result);
  ++view_.version;
  changed_.SignalAll();
}

ImageManager::ImageManager(Options options, Journal& journal, BrokerMetrics& metrics)
    : options_(std::move(options)),
      journal_(journal),
      metrics_(metrics),
      adoption_deadline_(MonotonicNow() + options_.adoption_grace),
      tenants_(options_.models.size()),
      thread_([this] { Run(); }) {}

void ImageManager::Stop() {
  {
    MutexLock lock(&mu_);
    stopping_ = true;
    changed_.SignalAll();
  }
  if (thread_.joinable()) thread_.join();
}

bool ImageManager::stopping() {
  MutexLock lock(&mu_);
  return stopping_;
}

std::shared_ptr<ImageJob> ImageManager::Prepare(TenantId tenant) {
  // A folder that cannot be read has no signature; the job itself will say why.
  const std::string signature =
      FolderSignature(options_.models[tenant.value()].folder).value_or("");
  MutexLock lock(&mu_);
  Tenant& known = tenants_[tenant.value()];
  if (known.job != nullptr) {
    const ImageJob::View view = known.job->Await(~uint64_t{0}, absl::ZeroDuration());
    const bool failed_lately = view.finished && !view.result.ok() &&
                               MonotonicNow() < known.failed_at + options_.retry_delay;
    const bool current = view.finished && view.result.ok() && known.signature == signature;
    if (!view.finished || failed_lately || current) return known.job;
  }
  known.job = std::make_shared<ImageJob>();
  if (stopping_) {
    known.job->Finish(absl::UnavailableError("the broker is shutting down"));
  } else {
    queue_.push_back(tenant);
    changed_.SignalAll();
  }
  return known.job;
}

void ImageManager::Run() {
  while (true) {
    TenantId tenant;
    std::shared_ptr<ImageJob> job;
    {
      MutexLock lock(&mu_);
      while (queue_.empty() && !stopping_) changed_.Wait(&mu_);
      if (queue_.empty()) return;
      tenant = queue_.front();
      queue_.pop_front();
      job = tenants_[tenant.value()].job;
    }
    absl::StatusOr<std::shared_ptr<const SealedImage>> result =
        stopping() ? absl::UnavailableError("the broker is shutting down") : Make(tenant, *job);
    if (!result.ok()) {
      Log(LogLevel::kError, "no parameter image",
          {{"model", options_.models[tenant.value()].folder}, {"error", result.status()}});
      MutexLock lock(&mu_);
      tenants_[tenant.value()].failed_at = MonotonicNow();
    }
    job->Finish(std::move(result));
  }
}

absl::StatusOr<std::shared_ptr<const SealedImage>> ImageManager::Make(TenantId tenant,
                                                                      ImageJob& job) {
  const TenantModel& model = options_.models[tenant.value()];
  for (int attempt = 0; attempt < kSourceTries; ++attempt) {
    const absl::StatusOr<std::string> before = FolderSignature(model.folder);
    if (!before.ok()) return before.status();
    const absl::Time start = MonotonicNow();
    const absl::StatusOr<std::string> fingerprint = FingerprintModel(
        model.folder,
        PackingSpec{.packing_version = kPackingVersion,
                    .format = options_.format,
                    .ranks = options_.ranks,
                    .dummy_seed = model.dummy_seed},
        [&job](Bytes done, Bytes total) { job.Progress("fingerprint", done, total); });
    if (!fingerprint.ok()) return fingerprint.status();
    metrics_.ImagePhase("fingerprint", MonotonicNow() - start);
    std::shared_ptr<const Image> image = AwaitAdoption(*fingerprint);
    if (image == nullptr) {
      absl::StatusOr<std::shared_ptr<const Image>> packed = PackOnce(model, *fingerprint, job);
      if (!packed.ok()) return packed.status();
      image = *std::move(packed);
    }
    const absl::StatusOr<std::string> after = FolderSignature(model.folder);
    if (!after.ok()) return after.status();
    if (*before != *after) continue;
    {
      MutexLock lock(&mu_);
      tenants_[tenant.value()].signature = *after;
      tenants_[tenant.value()].fingerprint = *fingerprint;
    }
    Keep(image);
    return ForTenant(*image, tenant);
  }
  return absl::FailedPreconditionError(absl::StrCat("the model folder ", model.folder,
                                                    " changed each of the ", kSourceTries,
                                                    " times it was read; finish writing it first"));
}

std::shared_ptr<const ImageManager::Image> ImageManager::AwaitAdoption(
    const std::string& fingerprint) {
  MutexLock lock(&mu_);
  while (true) {
    const auto found = images_.find(fingerprint);
    if (found != images_.end()) return found->second;
    if (stopping_ || !options_.expected.contains(fingerprint)) return nullptr;
    if (changed_.WaitWithDeadline(&mu_, adoption_deadline_)) {
      const auto last = images_.find(fingerprint);
      return last == images_.end() ? nullptr : last->second;
    }
  }
}

absl::StatusOr<std::shared_ptr<const ImageManager::Image>> ImageManager::PackOnce(
    const TenantModel& model, const std::string& fingerprint, ImageJob& job) {
  absl::StatusOr<v1::ImageManifest> plan =
      PlanImage(model, options_.slab_bytes, options_.format, options_.ranks);
  if (!plan.ok()) return plan.status();
  const absl::Time start = MonotonicNow();
  absl::StatusOr<UniqueFd> memory = RunPacker(
      PackerRun{options_.packer, model.folder, model.dummy_seed, *plan, options_.pack_deadline},
      [&job](Bytes done, Bytes total) { job.Progress("pack", done, total); },
      [this] { return stopping(); });
  if (!memory.ok()) return memory.status();
  metrics_.ImagePhase("pack", MonotonicNow() - start);
  absl::StatusOr<std::shared_ptr<const Image>> image =
      Complete(fingerprint, *std::move(plan), *std::move(memory), &job);
  if (!image.ok()) return image.status();
  const auto& recorded = journal_.recovered().images;
  if (const auto earlier = recorded.find(fingerprint); earlier != recorded.end()) {
    v1::ImageManifest manifest;
    if (manifest.ParseFromString(earlier->second.manifest()) &&
        manifest.slab_bytes() == (*image)->manifest.slab_bytes() &&
        !std::equal(manifest.slab_checksums().begin(), manifest.slab_checksums().end(),
                    (*image)->manifest.slab_checksums().begin(),
                    (*image)->manifest.slab_checksums().end())) {
      return absl::DataLossError(
          "the image differs from the one that an earlier broker packed from the same files: is "
          "the "
          "packer of another release, or memory faulty?");
    }
  }
  journal::Record record;
  record.mutable_image()->set_fingerprint(fingerprint);
  record.mutable_image()->set_device((*image)->device);
  record.mutable_image()->set_inode((*image)->inode);
  record.mutable_image()->set_manifest((*image)->manifest.SerializeAsString());
  if (absl::Status status = journal_.Append({record}); !status.ok()) return status;
  Log(LogLevel::kInfo, "parameter image packed",
      {{"model", model.folder},
       {"bytes", WholeImageBytes((*image)->manifest)},
       {"ranks", options_.ranks},
       {"seconds", MonotonicNow() - start}});
  return image;
}

absl::StatusOr<std::shared_ptr<const ImageManager::Image>> ImageManager::Complete(
    const std::string& fingerprint, v1::ImageManifest manifest, UniqueFd memory, ImageJob* job) {
  const absl::Time start = MonotonicNow();
  const Bytes size = WholeImageBytes(manifest);
  absl::StatusOr<Mapping> mapping = Mapping::Map(memory.get(), size, MapAccess::kRead);
  if (!mapping.ok()) return mapping.status();
  // Restores read it at once then, and workers map it at once.
  ForEachOnAllCores(CeilDiv(size, kCollapsed), [&mapping, size](int64_t i) {
    const Bytes begin = kCollapsed * i;
    CollapsePages(mapping->data() + begin.count(), std::min(kCollapsed, size - begin));
  });
  const std::vector<uint64_t> checksums = ImageChecksums(
      absl::MakeConstSpan(mapping->data(), mapping->size()),
      Bytes(static_cast<int64_t>(manifest.slab_bytes())), [job](Bytes done, Bytes total) {
        if (job != nullptr) job->Progress("checksum", done, total);
      });
  metrics_.ImagePhase("checksum", MonotonicNow() - start);
  struct stat file;
  if (fstat(memory.get(), &file) != 0) return ErrnoStatus("fstat of an image");
  manifest.set_fingerprint(fingerprint);
  manifest.clear_slab_checksums();
  manifest.mutable_slab_checksums()->Add(checksums.begin(), checksums.end());
  auto image = std::make_shared<Image>();
  image->fingerprint = fingerprint;
  image->manifest = std::move(manifest);
  image->descriptor = std::make_shared<const UniqueFd>(std::move(memory));
  image->device = file.st_dev;
  image->inode = file.st_ino;
  return image;
}

absl::Status ImageManager::Adopt(const journal::Image& recorded, UniqueFd image) {
  struct stat file;
  if (fstat(image.get(), &file) != 0) return ErrnoStatus("fstat of a returned image");
  if (file.st_dev != recorded.device() || file.st_ino != recorded.inode()) {
    return absl::PermissionDeniedError("the returned image is other memory than was handed out");
  }
  v1::ImageManifest manifest;
  if (!manifest.ParseFromString(recorded.manifest())) {
    return absl::DataLossError("the journal's manifest of the image does not parse");
  }
  {
    MutexLock lock(&mu_);
    if (images_.contains(recorded.fingerprint())) return absl::OkStatus();
  }
  const Bytes size = WholeImageBytes(manifest);
  if (absl::Status status = CheckSealed(image.get(), size); !status.ok()) return status;
  const auto sums = manifest.slab_checksums();
  absl::StatusOr<std::shared_ptr<const Image>> complete =
      Complete(recorded.fingerprint(), std::move(manifest), std::move(image), nullptr);
  if (!complete.ok()) return complete.status();
  const auto& found = (*complete)->manifest.slab_checksums();
  if (!std::equal(sums.begin(), sums.end(), found.begin(), found.end())) {
    return absl::DataLossError("the returned image does not have the recorded checksums");
  }
  Keep(*complete);
  return absl::OkStatus();
}

void ImageManager::Keep(const std::shared_ptr<const Image>& image) {
  MutexLock lock(&mu_);
  images_.emplace(image->fingerprint, image);
  // Sessions hold the memory of images that no tenant starts with any more.
  std::erase_if(images_, [this, &image](const auto& entry) ABSL_NO_THREAD_SAFETY_ANALYSIS {
    return entry.first != image->fingerprint && !options_.expected.contains(entry.first) &&
           std::none_of(tenants_.begin(), tenants_.end(), [&entry](const Tenant& tenant) {
             return tenant.fingerprint == entry.first;
           });
  });
  changed_.SignalAll();
}

std::shared_ptr<const SealedImage> ImageManager::ForTenant(const Image& image,
                                                           TenantId tenant) const {
  const TenantModel& model = options_.models[tenant.value()];
  // Manifests that earlier releases recorded name none.
  const KvDtype packed_for = ParseKvDtype(image.manifest.kv_dtype()).value_or(KvDtype::kBf16);
  const uint64_t token_numbers = image.manifest.kv_block_bytes() /
                                 image.manifest.kv_block_tokens() / KvElementBytes(packed_for);
  auto sealed = std::make_shared<SealedImage>();
  sealed->fingerprint = image.fingerprint;
  sealed->manifest = image.manifest;
  sealed->manifest.set_kv_block_bytes(token_numbers * KvElementBytes(model.kv_dtype) *
                                      static_cast<uint64_t>(model.kv_block_tokens));
  sealed->manifest.set_kv_dtype(std::string(KvDtypeName(model.kv_dtype)));
  sealed->manifest.set_kv_block_tokens(static_cast<uint32_t>(model.kv_block_tokens));
  sealed->manifest.set_max_sequence_tokens(static_cast<uint32_t>(model.max_sequence_tokens));
  sealed->stages = StagesOf(image.manifest);
  sealed->descriptor = image.descriptor;
  return sealed;
}

std::shared_ptr<const SealedImage> ImageManager::Find(const std::string& fingerprint,
                                                      TenantId tenant) {
  MutexLock lock(&mu_);
  const auto found = images_.find(fingerprint);
  return found == images_.end() ? nullptr : ForTenant(*found->second, tenant);
}

std::string ImageManager::Fingerprint(TenantId tenant) {
  MutexLock lock(&mu_);
  return tenants_[tenant.value()].fingerprint;
}

}  // namespace palimpsest
