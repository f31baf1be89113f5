#include "broker/core/slab_ledger.h"

#include <string>
#include <utility>

#include "absl/strings/str_cat.h"

namespace palimpsest {
namespace {

bool HasOwner(SlabState state) {
  return state == SlabState::kGranted || state == SlabState::kRevoking ||
         state == SlabState::kQuarantined || state == SlabState::kLost;
}

}  // namespace

absl::string_view SlabRoleName(SlabRole role) {
  switch (role) {
    case SlabRole::kNone:
      return "none";
    case SlabRole::kParameter:
      return "parameter";
    case SlabRole::kKv:
      return "kv";
    case SlabRole::kSlot:
      return "slot";
    case SlabRole::kWorkspace:
      return "workspace";
  }
  return "invalid";
}

absl::string_view SlabStateName(SlabState state) {
  switch (state) {
    case SlabState::kFree:
      return "free";
    case SlabState::kGranted:
      return "granted";
    case SlabState::kRevoking:
      return "revoking";
    case SlabState::kQuiesced:
      return "quiesced";
    case SlabState::kScrubbed:
      return "scrubbed";
    case SlabState::kQuarantined:
      return "quarantined";
    case SlabState::kLost:
      return "lost";
  }
  return "invalid";
}

bool IsLegalTransition(SlabState from, SlabState to) {
  switch (from) {
    case SlabState::kFree:
      return to == SlabState::kGranted || to == SlabState::kLost;
    case SlabState::kGranted:
      return to == SlabState::kRevoking || to == SlabState::kQuiesced ||
             to == SlabState::kQuarantined || to == SlabState::kGranted;
    case SlabState::kRevoking:
      return to == SlabState::kQuiesced || to == SlabState::kQuarantined ||
             to == SlabState::kGranted;
    case SlabState::kLost:
      return to == SlabState::kGranted || to == SlabState::kQuiesced ||
             to == SlabState::kQuarantined;
    case SlabState::kQuarantined:
      return to == SlabState::kQuiesced;
    case SlabState::kQuiesced:
      return to == SlabState::kScrubbed || to == SlabState::kGranted;
    case SlabState::kScrubbed:
      return to == SlabState::kFree;
  }
  return false;
}

SlabLedger::SlabLedger(uint32_t pool_slabs, uint32_t generation)
    : generation_(generation), slabs_(pool_slabs) {
  counts_[static_cast<size_t>(SlabState::kFree)] = pool_slabs;
  for (uint32_t i = 0; i < pool_slabs; ++i) Append(free_, i);
}

Epoch SlabLedger::NextEpoch() {
  return Epoch((static_cast<uint64_t>(generation_) << 32) | ++epoch_counter_);
}

std::optional<SlabId> SlabLedger::FirstFree() const {
  if (free_.head == kNil) return std::nullopt;
  return SlabId(free_.head);
}

absl::Status SlabLedger::CheckSlab(SlabId slab) const {
  if (Contains(slab)) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("slab ", slab.value(), " is outside the pool of ", slabs_.size(), " slabs"));
}

SlabLedger::List* SlabLedger::ListOf(const SlabRecord& record) {
  if (record.state == SlabState::kFree) return &free_;
  if (record.owner.has_value()) return &owned_[*record.owner];
  return nullptr;
}

void SlabLedger::Append(List& list, uint32_t slab) {
  slabs_[slab].previous = list.tail;
  slabs_[slab].next = kNil;
  (list.tail == kNil ? list.head : slabs_[list.tail].next) = slab;
  list.tail = slab;
  ++list.size;
}

void SlabLedger::Remove(List& list, uint32_t slab) {
  const uint32_t previous = slabs_[slab].previous;
  const uint32_t next = slabs_[slab].next;
  (previous == kNil ? list.head : slabs_[previous].next) = next;
  (next == kNil ? list.tail : slabs_[next].previous) = previous;
  slabs_[slab].previous = slabs_[slab].next = kNil;
  --list.size;
}

absl::Status SlabLedger::Transition(SlabId slab, SlabState to, const SlabRecord& next) {
  SlabRecord& record = slabs_[slab.value()].record;
  if (!IsLegalTransition(record.state, to)) {
    return absl::FailedPreconditionError(absl::StrCat("slab ", slab.value(), " is ",
                                                      SlabStateName(record.state),
                                                      " and cannot become ", SlabStateName(to)));
  }
  const SlabState from = record.state;
  const std::optional<SessionId> owner = record.owner;
  List* const old_list = ListOf(record);
  const bool same_list = from != SlabState::kFree && to != SlabState::kFree && owner == next.owner;
  if (!same_list && old_list != nullptr) Remove(*old_list, slab.value());
  record = next;
  record.state = to;
  if (!same_list) {
    if (List* const list = ListOf(record); list != nullptr) Append(*list, slab.value());
    if (owner.has_value()) {
      if (auto it = owned_.find(*owner); it->second.size == 0) owned_.erase(it);
    }
  }
  --counts_[static_cast<size_t>(from)];
  ++counts_[static_cast<size_t>(to)];
  return absl::OkStatus();
}

absl::Status SlabLedger::Grant(SlabId slab, const Grantee& to, Epoch epoch,
                               RegionIndex region_index) {
  if (absl::Status status = CheckSlab(slab); !status.ok()) return status;
  if (record(slab).state != SlabState::kFree) {
    return absl::FailedPreconditionError(absl::StrCat("slab ", slab.value(), " is ",
                                                      SlabStateName(record(slab).state),
                                                      ": only a free slab can be granted"));
  }
  if (to.role == SlabRole::kNone) return absl::InvalidArgumentError("a grant needs a role");
  return Transition(slab, SlabState::kGranted,
                    SlabRecord{.state = SlabState::kGranted,
                               .role = to.role,
                               .owner = to.session,
                               .epoch = epoch,
                               .region_index = region_index,
                               .last_tenant = to.tenant});
}

absl::Status SlabLedger::GrantUncleaned(SlabId slab, const Grantee& to, Epoch epoch,
                                        RegionIndex region_index) {
  if (absl::Status status = CheckSlab(slab); !status.ok()) return status;
  if (record(slab).state != SlabState::kQuiesced || record(slab).last_tenant != to.tenant) {
    return absl::FailedPreconditionError(
        absl::StrCat("slab ", slab.value(), " is ", SlabStateName(record(slab).state),
                     ": only a quiesced slab goes uncleaned, and only to the tenant that had it"));
  }
  if (to.role == SlabRole::kNone) return absl::InvalidArgumentError("a grant needs a role");
  return Transition(slab, SlabState::kGranted,
                    SlabRecord{.state = SlabState::kGranted,
                               .role = to.role,
                               .owner = to.session,
                               .epoch = epoch,
                               .region_index = region_index,
                               .last_tenant = to.tenant});
}

absl::Status SlabLedger::Adopt(SlabId slab, const Grantee& by, Epoch epoch,
                               RegionIndex region_index) {
  if (absl::Status status = CheckSlab(slab); !status.ok()) return status;
  if (by.role == SlabRole::kNone) return absl::InvalidArgumentError("an adoption needs a role");
  return Transition(slab, SlabState::kLost,
                    SlabRecord{.state = SlabState::kLost,
                               .role = by.role,
                               .owner = by.session,
                               .epoch = epoch,
                               .region_index = region_index,
                               .last_tenant = by.tenant});
}

absl::Status SlabLedger::BeginRevoke(SlabId slab) {
  if (absl::Status status = CheckSlab(slab); !status.ok()) return status;
  return Transition(slab, SlabState::kRevoking, record(slab));
}

absl::Status SlabLedger::Readopt(SlabId slab) {
  if (absl::Status status = CheckSlab(slab); !status.ok()) return status;
  const SlabState state = record(slab).state;
  if (state != SlabState::kLost && state != SlabState::kRevoking) {
    return absl::FailedPreconditionError(
        absl::StrCat("slab ", slab.value(), " is ", SlabStateName(state),
                     ": only a lost one returns, or one that was asked back"));
  }
  return Transition(slab, SlabState::kGranted, record(slab));
}

absl::Status SlabLedger::Move(SlabId slab, SlabRole role, RegionIndex region_index) {
  if (absl::Status status = CheckSlab(slab); !status.ok()) return status;
  const auto moves = [](SlabRole r) { return r == SlabRole::kParameter || r == SlabRole::kSlot; };
  SlabRecord next = record(slab);
  if (next.state != SlabState::kGranted || !moves(next.role) || !moves(role)) {
    return absl::FailedPreconditionError(absl::StrCat(
        "slab ", slab.value(), " is ", SlabStateName(next.state), " as ", SlabRoleName(next.role),
        ": only granted ones move, between parameters and slots, not to ", SlabRoleName(role)));
  }
  next.role = role;
  next.region_index = region_index;
  return Transition(slab, SlabState::kGranted, next);
}

absl::Status SlabLedger::GiveBack(SlabId slab) {
  if (absl::Status status = CheckSlab(slab); !status.ok()) return status;
  SlabRecord next = record(slab);
  next.role = SlabRole::kNone;
  next.owner.reset();
  next.region_index = RegionIndex();
  return Transition(slab, SlabState::kQuiesced, next);
}

absl::Status SlabLedger::Quarantine(SlabId slab) {
  if (absl::Status status = CheckSlab(slab); !status.ok()) return status;
  return Transition(slab, SlabState::kQuarantined, record(slab));
}

absl::Status SlabLedger::Clean(SlabId slab) {
  if (absl::Status status = CheckSlab(slab); !status.ok()) return status;
  SlabRecord next = record(slab);
  next.last_tenant.reset();
  return Transition(slab, SlabState::kScrubbed, next);
}

absl::Status SlabLedger::Free(SlabId slab) {
  if (absl::Status status = CheckSlab(slab); !status.ok()) return status;
  return Transition(slab, SlabState::kFree, record(slab));
}

std::vector<SlabId> SlabLedger::SlabsOf(SessionId session) const {
  std::vector<SlabId> slabs;
  const auto it = owned_.find(session);
  if (it == owned_.end()) return slabs;
  slabs.reserve(it->second.size);
  for (uint32_t i = it->second.head; i != kNil; i = slabs_[i].next) slabs.push_back(SlabId(i));
  return slabs;
}

uint32_t SlabLedger::CountOf(SessionId session) const {
  const auto it = owned_.find(session);
  return it == owned_.end() ? 0 : it->second.size;
}

absl::Status SlabLedger::CheckConsistency() const {
  std::array<uint32_t, kSlabStates> counts = {};
  absl::flat_hash_map<SessionId, uint32_t> owned;
  for (uint32_t i = 0; i < slabs_.size(); ++i) {
    const SlabRecord& record = slabs_[i].record;
    ++counts[static_cast<size_t>(record.state)];
    if (record.owner.has_value()) ++owned[*record.owner];
    const bool has_owner = HasOwner(record.state);
    const bool has_tenant = has_owner || record.state == SlabState::kQuiesced;
    if (record.owner.has_value() != has_owner || (record.role != SlabRole::kNone) != has_owner ||
        record.last_tenant.has_value() != has_tenant) {
      return absl::InternalError(
          absl::StrCat("slab ", i, " is ", SlabStateName(record.state), " with role ",
                       SlabRoleName(record.role), ", ", record.owner.has_value() ? "an" : "no",
                       " owner and ", record.last_tenant.has_value() ? "a" : "no", " last tenant"));
    }
  }
  if (counts != counts_) return absl::InternalError("the counts by state are wrong");
  if (owned.size() != owned_.size()) return absl::InternalError("a session's list is stale");
  for (const auto& [session, count] : owned) {
    const std::vector<SlabId> listed = SlabsOf(session);
    if (listed.size() != count || CountOf(session) != count) {
      return absl::InternalError(absl::StrCat("session ", session.value(), " owns ", count,
                                              " slabs but lists ", listed.size()));
    }
    for (const SlabId slab : listed) {
      if (record(slab).owner != session) {
        return absl::InternalError(
            absl::StrCat("slab ", slab.value(), " is listed for a session that does not own it"));
      }
    }
  }
  uint32_t free = 0;
  for (uint32_t i = free_.head; i != kNil; i = slabs_[i].next) {
    if (slabs_[i].record.state != SlabState::kFree || ++free > slabs_.size()) {
      return absl::InternalError(absl::StrCat("slab ", i, " is wrongly in the free list"));
    }
  }
  if (free != Count(SlabState::kFree) || free != free_.size) {
    return absl::InternalError("the free list has the wrong length");
  }
  return absl::OkStatus();
}

}  // namespace palimpsest
