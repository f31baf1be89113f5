// Keeps a tier's blocks enciphered on its medium, each under its tenant's key: a back-end over
// another one, to which blocks are opaque bytes under opaque names (tenant_cipher.h).
//
// It stands between the store and the back-end, and not below, because there it knows the tenant
// and the identity that it binds, serves every tier, and leaves to each what it proves about
// crashes and to the store its own comparisons and checksums.
//
// A block of another key, or of which one bit was changed, is a DataLoss. What Open finds and
// cannot open (another key, no key any more, stored before encryption) is removed: the room is
// needed, and nobody can read it. Blocks that were stored without encryption are thereby forgotten,
// not overwritten: give a new file or folder to a tier that begins to be enciphered.
//
// Blocks are sealed by the thread that calls Write, and opened by the one that completes the read.
#ifndef PALIMPSEST_BROKER_TIER_ENCRYPTION_SEALED_BACKEND_H_
#define PALIMPSEST_BROKER_TIER_ENCRYPTION_SEALED_BACKEND_H_

#include <memory>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "broker/tier/aligned_buffer.h"
#include "broker/tier/encryption/tenant_keys.h"
#include "broker/tier/tier_backend.h"
#include "common/mutex.h"

namespace palimpsest {

class SealedBackend : public TierBackend {
 public:
  // Scratch blocks of probes have a key of this process.
  SealedBackend(std::unique_ptr<TierBackend> medium, TenantKeys keys);

  std::string name() const override;
  Bytes Footprint(Bytes length) const override {
    return medium_->Footprint(TenantCipher::SealedLength(length));
  }
  absl::StatusOr<std::vector<StoredBlock>> Open() override;
  void Close() override { medium_->Close(); }
  // FailedPrecondition if the tenant has no key, or the block more than TenantCipher::kMaxTokens.
  void Write(const BlockRecord& record, absl::Span<const std::byte> from, Written done) override;
  void Read(const BlockRecord& record, TierPlace place, absl::Span<std::byte> to,
            Done done) override;
  void Remove(const BlockRecord& record, TierPlace place, RemoveReason reason, Done done) override;
  void Purge(const std::string& tenant, Done done) override {
    medium_->Purge(tenant, std::move(done));
  }
  bool shared() const override { return medium_->shared(); }
  void Find(const BlockIdentity& id, Found done) override;
  // What no key opens is left out.
  void Discover(Discovered done) override;

 private:
  struct Transfer {
    const TenantCipher* cipher = nullptr;
    BlockRecord sealed;
    AlignedBuffer buffer;
  };

  const TenantCipher* CipherOf(const std::string& tenant) const;
  absl::Status NoKey(const std::string& tenant) const;
  // With the sealed record.
  std::unique_ptr<Transfer> Begin(const BlockRecord& record) const;
  void RemoveAll(const std::vector<StoredBlock>& blocks);

  AlignedBuffer TakeBuffer(Bytes size);
  void GiveBack(AlignedBuffer buffer);

  const std::unique_ptr<TierBackend> medium_;
  const TenantKeys keys_;
  const TenantCipher probes_;

  Mutex mutex_;
  // For the next transfers: fresh memory costs as much as enciphering does.
  std::vector<AlignedBuffer> buffers_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace palimpsest

#endif  // PALIMPSEST_BROKER_TIER_ENCRYPTION_SEALED_BACKEND_H_
