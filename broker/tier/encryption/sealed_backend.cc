#include "broker/tier/encryption/sealed_backend.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/log.h"

namespace palimpsest {
namespace {

constexpr size_t kKeptBuffers = 8;

}  // namespace

SealedBackend::SealedBackend(std::unique_ptr<TierBackend> medium, TenantKeys keys)
    : medium_(std::move(medium)), keys_(std::move(keys)), probes_(SecretKey::Random()) {}

std::string SealedBackend::name() const { return absl::StrCat(medium_->name(), " (enciphered)"); }

const TenantCipher* SealedBackend::CipherOf(const std::string& tenant) const {
  return tenant == kProbeTenant ? &probes_ : keys_.Find(tenant);
}

absl::Status SealedBackend::NoKey(const std::string& tenant) const {
  return absl::FailedPreconditionError(absl::StrCat("tenant ", tenant, " has no key in ",
                                                    keys_.folder(), ", and the tier ", name(),
                                                    " keeps no block without one"));
}

AlignedBuffer SealedBackend::TakeBuffer(Bytes size) {
  {
    MutexLock lock(&mutex_);
    for (AlignedBuffer& kept : buffers_) {
      if (kept.span().size() != size.count()) continue;
      std::swap(kept, buffers_.back());
      AlignedBuffer taken = std::move(buffers_.back());
      buffers_.pop_back();
      return taken;
    }
  }
  return AlignedBuffer(size);
}

void SealedBackend::GiveBack(AlignedBuffer buffer) {
  MutexLock lock(&mutex_);
  if (buffers_.size() == kKeptBuffers) buffers_.erase(buffers_.begin());
  buffers_.push_back(std::move(buffer));
}

std::unique_ptr<SealedBackend::Transfer> SealedBackend::Begin(const BlockRecord& record) const {
  auto transfer = std::make_unique<Transfer>();
  transfer->cipher = CipherOf(record.id.tenant);
  if (transfer->cipher != nullptr) transfer->sealed = transfer->cipher->SealRecord(record);
  return transfer;
}

absl::StatusOr<std::vector<StoredBlock>> SealedBackend::Open() {
  absl::StatusOr<std::vector<StoredBlock>> found = medium_->Open();
  if (!found.ok()) return found;
  std::vector<StoredBlock> opened, closed;
  for (StoredBlock& block : *found) {
    const TenantCipher* const cipher = CipherOf(block.record.id.tenant);
    absl::StatusOr<BlockRecord> record =
        cipher == nullptr ? NoKey(block.record.id.tenant) : cipher->OpenRecord(block.record);
    if (record.ok()) {
      opened.push_back({*std::move(record), block.place});
    } else {
      closed.push_back(std::move(block));
    }
  }
  RemoveAll(closed);
  return opened;
}

void SealedBackend::RemoveAll(const std::vector<StoredBlock>& blocks) {
  if (blocks.empty()) return;
  Mutex mutex;
  CondVar changed;
  size_t left = blocks.size(), failed = 0;
  for (const StoredBlock& block : blocks) {
    medium_->Remove(block.record, block.place, RemoveReason::kUnwanted,
                    [&](const absl::Status& status) {
                      MutexLock lock(&mutex);
                      failed += status.ok() || absl::IsNotFound(status) ? 0 : 1;
                      if (--left == 0) changed.Signal();
                    });
  }
  MutexLock lock(&mutex);
  while (left > 0) changed.Wait(&mutex);
  Log(LogLevel::kWarning, "blocks that no key opens are removed from a tier",
      {{"tier", name()},
       {"blocks", blocks.size()},
       {"one_of_tenant", blocks[0].record.id.tenant},
       {"not_removed", failed}});
}

void SealedBackend::Write(const BlockRecord& record, absl::Span<const std::byte> from,
                          Written done) {
  if (record.id.tokens.size() > TenantCipher::kMaxTokens) {
    return done(absl::FailedPreconditionError(
        absl::StrCat("a block of ", record.id.tokens.size(), " tokens for the tier ", name(),
                     ", which keeps such of ", TenantCipher::kMaxTokens, " or fewer")));
  }
  std::unique_ptr<Transfer> transfer = Begin(record);
  if (transfer->cipher == nullptr) return done(NoKey(record.id.tenant));
  transfer->buffer = TakeBuffer(transfer->sealed.length);
  transfer->cipher->SealBytes(record, from, transfer->buffer.span());
  const BlockRecord& sealed = transfer->sealed;
  const absl::Span<const std::byte> bytes = transfer->buffer.span();
  medium_->Write(sealed, bytes,
                 [this, transfer = std::move(transfer),
                  done = std::move(done)](absl::StatusOr<TierPlace> place) mutable {
                   GiveBack(std::move(transfer->buffer));
                   done(std::move(place));
                 });
}

void SealedBackend::Read(const BlockRecord& record, TierPlace place, absl::Span<std::byte> to,
                         Done done) {
  std::unique_ptr<Transfer> transfer = Begin(record);
  if (transfer->cipher == nullptr) return done(NoKey(record.id.tenant));
  transfer->buffer = TakeBuffer(transfer->sealed.length);
  const BlockRecord& sealed = transfer->sealed;
  const absl::Span<std::byte> bytes = transfer->buffer.span();
  medium_->Read(sealed, place, bytes,
                [this, &record, to, transfer = std::move(transfer),
                 done = std::move(done)](absl::Status status) mutable {
                  if (status.ok()) {
                    status = transfer->cipher->OpenBytes(record, transfer->buffer.span(), to);
                  }
                  GiveBack(std::move(transfer->buffer));
                  done(std::move(status));
                });
}

void SealedBackend::Remove(const BlockRecord& record, TierPlace place, RemoveReason reason,
                           Done done) {
  std::unique_ptr<Transfer> transfer = Begin(record);
  if (transfer->cipher == nullptr) return done(NoKey(record.id.tenant));
  const BlockRecord& sealed = transfer->sealed;
  medium_->Remove(sealed, place, reason,
                  [transfer = std::move(transfer), done = std::move(done)](
                      absl::Status status) mutable { done(std::move(status)); });
}

void SealedBackend::Find(const BlockIdentity& id, Found done) {
  const TenantCipher* const cipher = CipherOf(id.tenant);
  if (cipher == nullptr) return done(absl::NotFoundError("the tenant has no key"));
  auto sealed = std::make_unique<BlockIdentity>(
      BlockIdentity{.key = cipher->SealKey(id.key), .tenant = id.tenant});
  const BlockIdentity& wanted = *sealed;
  medium_->Find(wanted, [cipher, sealed = std::move(sealed),
                         done = std::move(done)](absl::StatusOr<StoredBlock> found) mutable {
    if (!found.ok()) return done(std::move(found));
    absl::StatusOr<BlockRecord> record = cipher->OpenRecord(found->record);
    // Its writer will find out and remove it.
    if (!record.ok()) return done(absl::NotFoundError(record.status().message()));
    done(StoredBlock{*std::move(record), found->place});
  });
}

void SealedBackend::Discover(Discovered done) {
  medium_->Discover([this, done = std::move(done)](absl::StatusOr<Discovery> seen) mutable {
    if (!seen.ok()) return done(std::move(seen));
    Discovery opened{.complete = seen->complete};
    for (const StoredBlock& block : seen->found) {
      const TenantCipher* const cipher = CipherOf(block.record.id.tenant);
      if (cipher == nullptr) continue;
      absl::StatusOr<BlockRecord> record = cipher->OpenRecord(block.record);
      if (record.ok()) opened.found.push_back({*std::move(record), block.place});
    }
    for (Discovery::Gone& gone : seen->gone) {
      const TenantCipher* const cipher = CipherOf(gone.tenant);
      if (cipher == nullptr) continue;
      opened.gone.push_back({std::move(gone.tenant), cipher->OpenKey(gone.key)});
    }
    done(std::move(opened));
  });
}

}  // namespace palimpsest
