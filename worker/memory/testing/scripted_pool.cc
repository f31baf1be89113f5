#include "worker/memory/testing/scripted_pool.h"

#include <algorithm>

#include "gtest/gtest.h"

namespace palimpsest {
namespace {

v1::SlabRole RoleOf(SlabRole role) {
  switch (role) {
    case SlabRole::kParameter:
      return v1::SLAB_ROLE_PARAMETER;
    case SlabRole::kSlot:
      return v1::SLAB_ROLE_SLOT;
    default:
      return v1::SLAB_ROLE_UNSPECIFIED;
  }
}

int64_t Count(const std::vector<std::optional<SlabId>>& slabs) {
  return std::count_if(slabs.begin(), slabs.end(), [](const auto& s) { return s.has_value(); });
}

}  // namespace

ScriptedPool::ScriptedPool(FakeBroker* broker, const FakeBroker::Model& model)
    : broker_(broker), pool_slabs_(model.pool_slabs) {
  uint32_t first = 0;
  for (size_t i = 0; i < model.stages.size(); ++i) {
    const bool layer = i > 0 && i + 1 < model.stages.size();
    stages_.push_back({first, model.stages[i], layer});
    first += model.stages[i];
  }
  parameters_.resize(first);
  slots_.resize(first);
  for (uint32_t i = 0; i < pool_slabs_; ++i) free_.insert(i);
  broker_->AwaitAttached(1);
}

void ScriptedPool::ComeBack(uint32_t slab) {
  broker_->Fill(slab, kPattern);
  ASSERT_TRUE(free_.insert(slab).second) << "slab " << slab << " came back twice";
}

SlabPlaces ScriptedPool::Places() { return {stages_, parameters_, slots_}; }

bool ScriptedPool::whole() const {
  for (uint32_t stage = 0; stage < stages_.size(); ++stage) {
    if (std::binary_search(rotation_.stages.begin(), rotation_.stages.end(), stage)) continue;
    for (uint32_t i = 0; i < stages_[stage].slab_count; ++i) {
      if (!parameters_[stages_[stage].first_slab + i].has_value()) return false;
    }
  }
  return true;
}

bool ScriptedPool::GrantImage() {
  if (!idle() || !rotation_.none()) return false;
  std::vector<uint32_t> slabs, places;
  for (uint32_t i = 0; i < parameters_.size(); ++i) {
    if (parameters_[i].has_value()) continue;
    places.push_back(i);
  }
  if (places.empty() || free_.size() < places.size()) return false;
  for (const uint32_t place : places) {
    slabs.push_back(TakeFree());
    parameters_[place] = SlabId(slabs.back());
  }
  awaited_ = broker_->Grant(v1::SLAB_ROLE_PARAMETER, slabs, places);
  state_ = State::kGranting;
  return true;
}

bool ScriptedPool::RevokeStage(uint32_t stage) {
  const ParameterStage& at = stages_[stage];
  if (!idle() || !rotation_.none() || !parameters_[at.first_slab].has_value()) return false;
  std::vector<uint32_t> places;
  for (uint32_t i = 0; i < at.slab_count; ++i) places.push_back(at.first_slab + i);
  awaited_ = broker_->RevokeParameters(places);
  state_ = State::kRevoking;
  return true;
}

int64_t ScriptedPool::Missing(const Rotation& rotation) const {
  const int64_t layer = stages_[1].slab_count;
  const int64_t whole = static_cast<int64_t>(parameters_.size()) - rotation.freed() * layer;
  return whole - Count(parameters_) - Count(slots_);
}

bool ScriptedPool::Rotate(const Rotation& rotation) {
  if (!idle() || !whole()) return false;
  const int64_t missing = Missing(rotation);
  if (missing > static_cast<int64_t>(free_.size())) return false;
  wanted_ = rotation;
  dissolving_ = false;
  if (missing <= 0) {
    SendRotation();
    return true;
  }
  std::vector<uint32_t> slabs, places;
  uint32_t place = stages_[1].slab_count * static_cast<uint32_t>(rotation_.slots);
  for (int64_t i = 0; i < missing; ++i) {
    while (slots_[place].has_value()) ++place;
    slabs.push_back(TakeFree());
    places.push_back(place);
    slots_[place] = SlabId(slabs.back());
  }
  awaited_ = broker_->Grant(v1::SLAB_ROLE_SLOT, slabs, places);
  state_ = State::kGrantingSpare;
  return true;
}

bool ScriptedPool::Dissolve() {
  if (!idle() || rotation_.none()) return false;
  wanted_ = Rotation();
  dissolving_ = true;
  SendRotation();
  return true;
}

void ScriptedPool::SendRotation() {
  if (dissolving_) {
    moves_ = PlanDissolution(Places());
  } else {
    const auto moves = PlanMoves(Places(), rotation_, *wanted_);
    ASSERT_TRUE(moves.ok()) << moves.status();
    moves_ = *moves;
  }
  v1::SetRotation message;
  for (const int32_t stage : wanted_->stages) {
    message.mutable_rotation()->add_stages(static_cast<uint32_t>(stage));
  }
  message.mutable_rotation()->set_slots(static_cast<uint32_t>(wanted_->slots));
  for (const SlabMove& move : moves_) {
    v1::MovedSlab& slab = *message.add_moves();
    slab.set_slab_id(move.slab.value());
    slab.set_role(RoleOf(move.role));
    slab.set_region_index(move.place.value());
  }
  state_ = State::kRotating;
  awaited_ = broker_->SetRotation(message);
}

bool ScriptedPool::GrantKv(uint32_t slabs) {
  if (slabs == 0 || slabs > free_.size()) return false;
  std::vector<uint32_t> granted;
  for (uint32_t i = 0; i < slabs; ++i) granted.push_back(TakeFree());
  kv_.insert(granted.begin(), granted.end());
  broker_->Grant(v1::SLAB_ROLE_KV, granted);
  return true;
}

void ScriptedPool::RevokeKv(uint32_t slabs) {
  broker_->RevokeKv(slabs);
  ++kv_revokes_;
}

void ScriptedPool::Pump() {
  while (const std::optional<v1::WorkerMessage> message = broker_->Next()) Handle(*message);
}

void ScriptedPool::Handle(const v1::WorkerMessage& message) {
  if (message.has_set_kv_target()) kv_target_ = message.set_kv_target().target_slabs();
  if (message.has_grant_mapped() && message.grant_mapped().grant_id() == awaited_) {
    if (state_ == State::kGrantingSpare) return SendRotation();
    state_ = State::kIdle;
  }
  if (message.has_release_kv()) {
    for (const uint32_t slab : message.release_kv().slab_ids()) {
      ASSERT_EQ(kv_.erase(slab), 1);
      ComeBack(slab);
    }
  }
  if (message.has_revoke_done()) {
    const v1::RevokeDone& done = message.revoke_done();
    const bool parameters = state_ == State::kRevoking && done.revoke_id() == awaited_;
    for (const uint32_t slab : done.slab_ids()) {
      if (parameters) {
        const auto at = std::find(parameters_.begin(), parameters_.end(), SlabId(slab));
        ASSERT_NE(at, parameters_.end());
        at->reset();
      } else {
        ASSERT_EQ(kv_.erase(slab), 1);
      }
      ComeBack(slab);
    }
    if (!parameters && !done.more()) --kv_revokes_;
    if (parameters && !done.more()) state_ = State::kIdle;
  }
  if (message.has_rotation_done()) {
    ASSERT_EQ(state_, State::kRotating);
    ASSERT_EQ(message.rotation_done().rotation_id(), awaited_);
    for (auto* places : {&parameters_, &slots_}) {
      for (std::optional<SlabId>& place : *places) {
        const bool moved =
            place.has_value() && std::any_of(moves_.begin(), moves_.end(),
                                             [&](const SlabMove& m) { return m.slab == *place; });
        if (moved) place.reset();
      }
    }
    for (const SlabMove& move : moves_) {
      if (move.role == SlabRole::kNone) {
        ComeBack(static_cast<uint32_t>(move.slab.value()));
      } else {
        auto& places = move.role == SlabRole::kParameter ? parameters_ : slots_;
        places[move.place.value()] = move.slab;
      }
    }
    rotation_ = *wanted_;
    const absl::Status status = CheckPlaces(Places(), rotation_);
    ASSERT_TRUE(status.ok()) << status;
    ++rotations_;
    state_ = State::kIdle;
  }
}

void ScriptedPool::Restart() {
  broker_->Kill();
  broker_->Start();
  broker_->AwaitAttached(++attached_);
  TakeOver(broker_->last_attach().reattach());
}

void ScriptedPool::TakeOver(const v1::Reattach& held) {
  std::set<uint32_t> claimed;
  std::fill(parameters_.begin(), parameters_.end(), std::nullopt);
  std::fill(slots_.begin(), slots_.end(), std::nullopt);
  kv_.clear();
  for (const v1::HeldSlab& slab : held.slabs()) {
    ASSERT_TRUE(claimed.insert(slab.slab_id()).second) << "slab " << slab.slab_id() << " twice";
    if (slab.role() == v1::SLAB_ROLE_KV) {
      kv_.insert(slab.slab_id());
      continue;
    }
    auto& places = slab.role() == v1::SLAB_ROLE_PARAMETER ? parameters_ : slots_;
    ASSERT_LT(slab.region_index(), places.size());
    ASSERT_FALSE(places[slab.region_index()].has_value()) << "place " << slab.region_index();
    places[slab.region_index()] = SlabId(slab.slab_id());
  }
  EXPECT_EQ(broker_->returned_slabs(), claimed);
  rotation_ = {};
  for (const uint32_t stage : held.rotation().stages()) {
    rotation_.stages.push_back(static_cast<int32_t>(stage));
  }
  rotation_.slots = static_cast<int32_t>(held.rotation().slots());
  const absl::Status status = CheckPlaces(Places(), rotation_);
  ASSERT_TRUE(status.ok()) << status;
  free_.clear();
  for (uint32_t slab = 0; slab < pool_slabs_; ++slab) {
    if (!claimed.contains(slab)) ComeBack(slab);
  }
  state_ = State::kIdle;
  kv_revokes_ = 0;
  wanted_.reset();
}

}  // namespace palimpsest
