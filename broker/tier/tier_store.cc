#include "broker/tier/tier_store.h"

#include <utility>

#include "broker/tier/tier_store_core.h"

namespace palimpsest {
namespace {

// The medium may still write to memory that requests pinned: none of it may ever be freed.
template <typename T>
void KeepForEver(std::unique_ptr<T> value) {
  static auto* const kept = new std::vector<std::unique_ptr<T>>;
  static auto* const mu = new Mutex;
  MutexLock lock(mu);
  kept->push_back(std::move(value));
}

}  // namespace

absl::StatusOr<std::unique_ptr<TierStore>> TierStore::Open(const Options& options,
                                                           std::unique_ptr<TierBackend> backend,
                                                           const Clock& clock, Observer* observer) {
  if (absl::Status status = options.Validate(); !status.ok()) return status;
  auto core = std::make_unique<Core>(options, std::move(backend), clock, observer);
  if (absl::Status status = core->Open(); !status.ok()) return status;
  return std::unique_ptr<TierStore>(new TierStore(std::move(core)));
}

TierStore::TierStore(std::unique_ptr<Core> core) : core_(std::move(core)) {}

TierStore::~TierStore() {
  if (!core_->Shutdown()) KeepForEver(std::move(core_));
}

absl::Status TierStore::Load(TierLoad request, Done done) {
  return core_->Load(std::move(request), std::move(done));
}

absl::Status TierStore::Store(TierStoring request, Done done) {
  return core_->Store(std::move(request), std::move(done));
}

bool TierStore::Remove(const BlockKey& key) { return core_->Remove(key); }

absl::Status TierStore::Purge(const std::string& tenant, absl::Time deadline, Done done) {
  return core_->Purge(tenant, deadline, std::move(done));
}

bool TierStore::Contains(const BlockIdentity& id) const { return core_->Contains(id); }

absl::Duration TierStore::ExpectedLoad(Bytes length) const { return core_->ExpectedLoad(length); }

std::vector<BlockRecord> TierStore::Records() const { return core_->Records(); }

void TierStore::SetCapacity(Bytes capacity) { core_->SetCapacity(capacity); }

void TierStore::SetTenantLimit(const std::string& tenant, Bytes limit) {
  core_->SetTenantLimit(tenant, limit);
}

TierStatus TierStore::status() const { return core_->status(); }

TenantTierStatus TierStore::tenant_status(const std::string& tenant) const {
  return core_->tenant_status(tenant);
}

absl::Status TierStore::CheckConsistency() const { return core_->CheckConsistency(); }

bool TierStore::WaitUntilServing(absl::Duration timeout) const {
  return core_->WaitUntilServing(timeout);
}

absl::Time TierStore::RunOnce() { return core_->RunOnce(); }

}  // namespace palimpsest
