// Parameter images: packs each model once, whoever of its tenants asks first, seals it, takes its
// checksums, and hands it to every session of a tenant with that model.
//
// An image is found by its fingerprint, which the broker computes from the model folder itself. A
// folder that changes while it is read is read again, and refused if it keeps changing. A folder
// that changed since is noticed at the next Prepare: sessions keep the image they started with.
//
// After a restart the images of running workers are awaited for a while (`expected`), and adopted
// when they come back, instead of being packed a second time beside them.
//
// Threads: thread-safe. One thread does the work, one image after the other; only Prepare (a few
// stats) and Adopt (reads the image once) block.
#ifndef PALIMPSEST_BROKER_SERVER_IMAGE_MANAGER_H_
#define PALIMPSEST_BROKER_SERVER_IMAGE_MANAGER_H_

#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "broker/core/slab_ledger.h"
#include "broker/server/broker_metrics.h"
#include "broker/server/journal.h"
#include "broker/server/packer_process.h"
#include "broker/server/sealed_image.h"
#include "common/bytes.h"
#include "common/mutex.h"
#include "worker/model/image_layout.h"
#include "worker/model/model_config.h"

namespace palimpsest {

struct TenantModel {
  std::string folder;
  int64_t max_sequence_tokens = 0;
  int64_t kv_block_tokens = 0;
  KvDtype kv_dtype = KvDtype::kBf16;
  // `load_format: dummy`: the seed of weights that are generated, not read.
  std::optional<uint64_t> dummy_seed = std::nullopt;
};

// What a model needs, from its config.json alone: the manifest without fingerprint and checksums.
absl::StatusOr<v1::ImageManifest> PlanImage(const TenantModel& model, Bytes slab_bytes,
                                            WeightFormat format = WeightFormat::kCpuPanels,
                                            int32_t ranks = 1);

// The preparation of one tenant's image, as those who wait for it see it. Thread-safe.
class ImageJob {
 public:
  struct View {
    // Changes with everything below.
    uint64_t version = 0;
    // "fingerprint", "pack", "checksum"; empty while the job waits for its turn.
    std::string phase;
    Bytes done;
    Bytes total;
    // If set, `result` stands.
    bool finished = false;
    absl::StatusOr<std::shared_ptr<const SealedImage>> result = absl::UnavailableError("not ready");
  };

  // Waits until the view has another version than `seen`, at most `timeout`.
  View Await(uint64_t seen, absl::Duration timeout);

  void Progress(absl::string_view phase, Bytes done, Bytes total);
  void Finish(absl::StatusOr<std::shared_ptr<const SealedImage>> result);

 private:
  Mutex mu_;
  CondVar changed_;
  View view_ ABSL_GUARDED_BY(mu_);
};

class ImageManager {
 public:
  struct Options {
    // By TenantId.
    std::vector<TenantModel> models;
    Bytes slab_bytes;
    WeightFormat format = WeightFormat::kCpuPanels;
    // GPUs that every model is cut for.
    int32_t ranks = 1;
    // Path of the packer's executable.
    std::string packer;
    absl::Duration pack_deadline = absl::Minutes(30);
    // Fingerprints of images that returning workers will bring, and how long they are waited for.
    std::set<std::string> expected;
    absl::Duration adoption_grace = absl::Seconds(30);
    // A failed preparation is not repeated sooner.
    absl::Duration retry_delay = absl::Seconds(2);
  };

  // `journal` and `metrics` must outlive it.
  ImageManager(Options options, Journal& journal, BrokerMetrics& metrics);
  ~ImageManager() { Stop(); }
  ImageManager(const ImageManager&) = delete;
  ImageManager& operator=(const ImageManager&) = delete;

  // Kills a running packer and fails the jobs that wait. Idempotent.
  void Stop();

  // The tenant's current preparation: joins one under way, returns a finished one whose folder has
  // not changed, or starts another.
  std::shared_ptr<ImageJob> Prepare(TenantId tenant);

  // Takes an image that an earlier broker packed. FailedPrecondition, PermissionDenied or DataLoss
  // if it is not, bit for bit, the recorded one.
  absl::Status Adopt(const journal::Image& recorded, UniqueFd image);

  // The image of that fingerprint as the tenant's sessions see it; null if it is not here.
  std::shared_ptr<const SealedImage> Find(const std::string& fingerprint, TenantId tenant);

  // Of the tenant's last prepared image; empty before.
  std::string Fingerprint(TenantId tenant);

 private:
  // The memory that tenants share.
  struct Image {
    std::string fingerprint;
    v1::ImageManifest manifest;  // of the tenant for which it was packed
    std::shared_ptr<const UniqueFd> descriptor;
    uint64_t device = 0;
    uint64_t inode = 0;
  };
  struct Tenant {
    std::shared_ptr<ImageJob> job;
    // Of the folder when the job read it.
    std::string signature;
    std::string fingerprint;
    absl::Time failed_at = absl::InfinitePast();
  };

  void Run();
  absl::StatusOr<std::shared_ptr<const SealedImage>> Make(TenantId tenant, ImageJob& job);
  absl::StatusOr<std::shared_ptr<const Image>> PackOnce(const TenantModel& model,
                                                        const std::string& fingerprint,
                                                        ImageJob& job);
  absl::StatusOr<std::shared_ptr<const Image>> Complete(const std::string& fingerprint,
                                                        v1::ImageManifest manifest, UniqueFd memory,
                                                        ImageJob* job);
  // Waits for an expected image; null if none came.
  std::shared_ptr<const Image> AwaitAdoption(const std::string& fingerprint);
  std::shared_ptr<const SealedImage> ForTenant(const Image& image, TenantId tenant) const;
  void Keep(const std::shared_ptr<const Image>& image);
  bool stopping();

  const Options options_;
  Journal& journal_;
  BrokerMetrics& metrics_;
  const absl::Time adoption_deadline_;

  Mutex mu_;
  CondVar changed_;
  bool stopping_ ABSL_GUARDED_BY(mu_) = false;
  std::deque<TenantId> queue_ ABSL_GUARDED_BY(mu_);
  std::vector<Tenant> tenants_ ABSL_GUARDED_BY(mu_);
  std::map<std::string, std::shared_ptr<const Image>> images_ ABSL_GUARDED_BY(mu_);
  std::thread thread_;
};

}  // namespace palimpsest

#endif  // PALIMPSEST_BROKER_SERVER_IMAGE_MANAGER_H_
