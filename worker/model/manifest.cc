#include "worker/model/manifest.h"

#include <limits>
#include <string>

#include "absl/strings/str_cat.h"

namespace palimpsest {
namespace {

constexpr int64_t kMaxBlockTokens = 4096;
constexpr size_t kFingerprintBytes = 32;

absl::Status Expect(absl::string_view field, uint64_t expected, uint64_t got) {
  if (expected == got) return absl::OkStatus();
  return absl::FailedPreconditionError(
      absl::StrCat("image manifest: ", field, ": expected ", expected, ", got ", got,
                   "; do broker and worker serve the same model folder?"));
}

absl::Status CheckStages(const v1::ImageManifest& manifest, const ImageLayout& layout) {
  absl::Status status = Expect("stages", layout.stages.size(), manifest.stages_size());
  for (int i = 0; status.ok() && i < manifest.stages_size(); ++i) {
    const StagePlacement& expected = layout.stages[static_cast<size_t>(i)];
    const v1::ImageStage& got = manifest.stages(i);
    if (got.name() != expected.name) {
      return absl::FailedPreconditionError(absl::StrCat("image manifest: stage ", i, ": expected ",
                                                        expected.name, ", got ",
                                                        got.name().substr(0, 80)));
    }
    status.Update(
        Expect(absl::StrCat(expected.name, ".first_slab"), expected.first_slab, got.first_slab()));
    status.Update(
        Expect(absl::StrCat(expected.name, ".slab_count"), expected.slab_count, got.slab_count()));
  }
  return status;
}

}  // namespace

absl::StatusOr<v1::ImageManifest> MakeManifest(const ModelConfig& config, const ImageLayout& layout,
                                               int64_t kv_block_tokens,
                                               int64_t max_sequence_tokens) {
  if (kv_block_tokens < 1 || kv_block_tokens > kMaxBlockTokens) {
    return absl::InvalidArgumentError(absl::StrCat("tokens of a KV block: expected 1 to ",
                                                   kMaxBlockTokens, ", got ", kv_block_tokens));
  }
  if (max_sequence_tokens < 1 || max_sequence_tokens > config.max_position) {
    return absl::InvalidArgumentError(
        absl::StrCat("longest sequence: expected 1 to ", config.max_position,
                     " tokens (max_position_embeddings), got ", max_sequence_tokens));
  }
  if (config.latent.has_value() && config.kv_dtype != KvDtype::kBf16) {
    return absl::InvalidArgumentError(
        absl::StrCat("kv_dtype ", KvDtypeName(config.kv_dtype), ": the latent vectors of a ",
                     config.architecture, " are stored as bf16 alone; set kv_dtype: bf16"));
  }
  v1::ImageManifest manifest;
  manifest.set_image_bytes(static_cast<uint64_t>(layout.total.count()));
  manifest.set_slab_bytes(static_cast<uint64_t>(layout.slab_bytes.count()));
  manifest.set_ranks(static_cast<uint32_t>(layout.ranks));
  manifest.set_weight_format(std::string(WeightFormatName(layout.format)));
  for (const StagePlacement& stage : layout.stages) {
    v1::ImageStage& out = *manifest.add_stages();
    out.set_name(stage.name);
    out.set_first_slab(static_cast<uint32_t>(stage.first_slab));
    out.set_slab_count(static_cast<uint32_t>(stage.slab_count));
  }
  manifest.set_kv_block_bytes(static_cast<uint64_t>(config.KvBytes(kv_block_tokens).count()));
  manifest.set_kv_block_tokens(static_cast<uint32_t>(kv_block_tokens));
  manifest.set_kv_dtype(std::string(KvDtypeName(config.kv_dtype)));
  manifest.set_max_sequence_tokens(static_cast<uint32_t>(max_sequence_tokens));
  return manifest;
}

Bytes WholeImageBytes(const v1::ImageManifest& manifest) {
  constexpr auto kMost = static_cast<uint64_t>(std::numeric_limits<int64_t>::max());
  const uint64_t ranks = manifest.ranks();
  if (ranks > 0 && manifest.image_bytes() > kMost / ranks)
    return Bytes(static_cast<int64_t>(kMost));
  return Bytes(static_cast<int64_t>(manifest.image_bytes() * ranks));
}

absl::Status CheckManifest(const v1::ImageManifest& manifest, const ModelConfig& config,
                           const ImageLayout& layout) {
  absl::Status status = Expect("slab_bytes", layout.slab_bytes.count(), manifest.slab_bytes());
  if (status.ok() && manifest.weight_format() != WeightFormatName(layout.format)) {
    return absl::FailedPreconditionError(absl::StrCat(
        "image manifest: weight_format: expected ", WeightFormatName(layout.format), ", got ",
        manifest.weight_format().substr(0, 80), "; do broker and worker use the same back-end?"));
  }
  status.Update(Expect("ranks", layout.ranks, manifest.ranks()));
  status.Update(Expect("image_bytes", layout.total.count(), manifest.image_bytes()));
  status.Update(CheckStages(manifest, layout));
  status.Update(Expect("fingerprint's bytes", kFingerprintBytes, manifest.fingerprint().size()));
  status.Update(Expect("slab_checksums", uint64_t(layout.slabs()) * layout.ranks,
                       manifest.slab_checksums_size()));
  if (!status.ok()) return status;
  if (manifest.kv_dtype() != KvDtypeName(config.kv_dtype)) {
    return absl::FailedPreconditionError(absl::StrCat("image manifest: kv_dtype: expected ",
                                                      KvDtypeName(config.kv_dtype), ", got ",
                                                      manifest.kv_dtype().substr(0, 80)));
  }
  auto expected =
      MakeManifest(config, layout, manifest.kv_block_tokens(), manifest.max_sequence_tokens());
  if (!expected.ok()) {
    return absl::FailedPreconditionError(
        absl::StrCat("image manifest: ", expected.status().message()));
  }
  return Expect("kv_block_bytes", expected->kv_block_bytes(), manifest.kv_block_bytes());
}

}  // namespace palimpsest
