// What the arbiter wants, checked against the node's own account and carried out.
#include <cmath>
#include <utility>
#include <variant>

#include "absl/strings/str_cat.h"
#include "broker/core/simulated_node.h"

namespace palimpsest {

void SimulatedNode::Drain() {
  for (ArbiterAction& action : arbiter_->TakeActions()) {
    std::visit([this](auto& a) { Do(std::move(a)); }, action);
  }
}

void SimulatedNode::Do(SendGrant grant) {
  absl::StrAppend(&log_, "grant ", grant.session.value(), " ", SlabRoleName(grant.role));
  const auto found = workers_.find(grant.session);
  if (found == workers_.end() || found->second.killed || !found->second.connected) {
    return Problem("a grant to a session that is not connected");
  }
  SimulatedWorker& worker = found->second;
  std::set<RegionIndex> places;
  for (const auto& [slab, entry] : worker.held) {
    if (entry.role == grant.role) places.insert(entry.region_index);
  }
  std::optional<RegionIndex> previous;
  for (const GrantedSlab& slab : grant.slabs) {
    absl::StrAppend(&log_, " ", slab.slab.value(), "@", slab.epoch.value());
    Shadow& shadow = shadow_[slab.slab.value()];
    if (shadow.holder.has_value()) Problem("a slab was granted that a process may still touch");
    const bool same = options_.skip_clean_for_same_tenant && shadow.dirty_by == worker.tenant;
    if (shadow.dirty_by.has_value() && !same) Problem("a slab was granted before it was cleaned");
    if (slab.epoch <= shadow.epoch || (slab.epoch.value() >> 32) != options_.generation) {
      Problem("an epoch did not grow or is of another generation");
    }
    if (grant.role != SlabRole::kKv) {
      if (!places.insert(slab.region_index).second) Problem("a place was granted twice");
      if (previous.has_value() && slab.region_index <= *previous) Problem("not in stage order");
      previous = slab.region_index;
    }
    shadow = Shadow{.holder = grant.session, .dirty_by = worker.tenant, .epoch = slab.epoch};
    const HeldSlab entry{slab.slab, slab.epoch, grant.role, slab.region_index};
    worker.held[slab.slab] = entry;
    journal_[slab.slab] = {grant.session, entry};
  }
  log_ += "\n";
  if (worker.held.size() > tenants_[worker.tenant.value()].config.quota_slabs) {
    Problem("a tenant exceeded its quota");
  }
  worker.grants.push_back(std::move(grant));
  NoteActivation(worker);
}

void SimulatedNode::CheckParameterRevoke(const SimulatedWorker& worker, const SendRevoke& revoke) {
  if (tenants_[worker.tenant.value()].config.pinned) Problem("a pinned tenant lost parameters");
  if (now_ < worker.irrevocable_until) Problem("parameters were revoked within their residence");
  std::set<RegionIndex> asked(revoke.region_indexes.begin(), revoke.region_indexes.end());
  std::set<RegionIndex> held, pending;
  for (const auto& [slab, entry] : worker.held) {
    if (entry.role == SlabRole::kParameter) held.insert(entry.region_index);
  }
  for (const SendRevoke& other : worker.revokes) {
    pending.insert(other.region_indexes.begin(), other.region_indexes.end());
  }
  // Whole stages, the last ones: nothing behind the first place asked for stays.
  for (const RegionIndex place : held) {
    if (place >= *asked.begin() && !asked.contains(place) && !pending.contains(place)) {
      Problem("a revoke left a hole in front of parameters that stay");
      break;
    }
  }
  for (const RegionIndex place : asked) {
    if (!held.contains(place)) Problem("a place was revoked that is vacant");
  }
}

void SimulatedNode::Do(SendRevoke revoke) {
  absl::StrAppend(&log_, "revoke ", revoke.session.value(), " ", SlabRoleName(revoke.role), " ",
                  revoke.kv_slabs, "+", revoke.region_indexes.size(), "\n");
  const auto found = workers_.find(revoke.session);
  if (found == workers_.end() || found->second.killed || !found->second.connected) {
    return Problem("a revoke for a session that is not connected");
  }
  SimulatedWorker& worker = found->second;
  if (revoke.deadline <= now_) Problem("a revoke without time to answer");
  if (revoke.kv_slabs == 0 && revoke.region_indexes.empty()) Problem("a revoke of nothing");
  if (revoke.role == SlabRole::kParameter) CheckParameterRevoke(worker, revoke);
  if (revoke.role == SlabRole::kWorkspace) Problem("a workspace was revoked");
  if (revoke.kv_slabs > worker.Count(SlabRole::kKv)) Problem("more KV revoked than held");
  worker.revokes.push_back(std::move(revoke));
}

void SimulatedNode::CheckRotation(const SimulatedWorker& worker, const SendSetRotation& rotation) {
  const SimulatedTenant& tenant = tenants_[worker.tenant.value()];
  uint32_t given_back = 0, slots = 0;
  for (const SlabMove& move : rotation.moves) given_back += move.role == SlabRole::kNone ? 1 : 0;
  if (!worker.rotation.none()) {
    slots = tenant.stages[worker.rotation.stages.front()].slab_count *
            static_cast<uint32_t>(worker.rotation.slots);
  }
  const uint32_t spare = worker.Count(SlabRole::kSlot) - slots;
  if (tenant.config.pinned) Problem("a pinned tenant's layers rotate");
  if (given_back > spare && now_ < worker.irrevocable_until) {
    Problem("layers were taken within their residence");
  }
  if (rotation.deadline <= now_) Problem("a rotation without time to answer");
  if (!worker.rotations.empty()) Problem("two rotations at a time");
  for (const SendGrant& grant : worker.grants) {
    if (grant.role == SlabRole::kParameter || grant.role == SlabRole::kSlot) {
      Problem("a rotation while parameters are being granted");
    }
  }
  for (const SendRevoke& revoke : worker.revokes) {
    if (revoke.role == SlabRole::kParameter) Problem("a rotation while parameters are revoked");
  }
  for (const SlabMove& move : rotation.moves) {
    const auto held = worker.held.find(move.slab);
    if (held == worker.held.end() ||
        (held->second.role != SlabRole::kParameter && held->second.role != SlabRole::kSlot)) {
      Problem("a rotation moves a slab that is neither parameter nor slot");
    }
  }
}

void SimulatedNode::Do(SendSetRotation rotation) {
  absl::StrAppend(&log_, "rotate ", rotation.session.value(), " to ", rotation.rotation.freed(),
                  " freed in ", rotation.rotation.slots, " slots, ", rotation.moves.size(),
                  " moves\n");
  const auto found = workers_.find(rotation.session);
  if (found == workers_.end() || found->second.killed || !found->second.connected) {
    return Problem("a rotation for a session that is not connected");
  }
  CheckRotation(found->second, rotation);
  found->second.rotations.push_back(std::move(rotation));
}

void SimulatedNode::CarryOut(SimulatedWorker& worker, const SendSetRotation& rotation) {
  std::vector<SlabId> given_back;
  for (const SlabMove& move : rotation.moves) {
    if (move.role == SlabRole::kParameter && rotation.rotation.freed() < worker.rotation.freed()) {
      worker.irrevocable_until = now_ + options_.min_residence;
    }
    if (move.role == SlabRole::kNone) {
      given_back.push_back(move.slab);
      continue;
    }
    HeldSlab& held = worker.held[move.slab];
    held.role = move.role;
    held.region_index = move.place;
  }
  worker.rotation = rotation.rotation;
  GiveUp(worker, given_back);
  CheckPlaces(worker);
}

// Every place of a worker that is not being granted or revoked anything has one slab: those of
// slots, and those of stages, except that rotating ones have none and missing ones may lack some.
void SimulatedNode::CheckPlaces(const SimulatedWorker& worker) {
  const std::vector<ParameterStage>& stages = tenants_[worker.tenant.value()].stages;
  std::vector<std::optional<SlabId>> parameters(stages.back().first_slab +
                                                stages.back().slab_count);
  std::vector<std::optional<SlabId>> slots(options_.pool_slabs);
  for (const auto& [slab, held] : worker.held) {
    if (held.role != SlabRole::kParameter && held.role != SlabRole::kSlot) continue;
    auto& place = (held.role == SlabRole::kSlot ? slots : parameters)[held.region_index.value()];
    if (place.has_value()) Problem("two slabs at one place");
    place = slab;
  }
  const absl::Status status = palimpsest::CheckPlaces({stages, parameters, slots}, worker.rotation);
  if (!status.ok()) Problem(status.ToString());
}

void SimulatedNode::FinishRotation(SimulatedWorker& worker) {
  const SendSetRotation rotation = std::move(worker.rotations.front());
  worker.rotations.pop_front();
  CarryOut(worker, rotation);
  NoteActivation(worker);
  arbiter_->OnRotationDone(worker.session, rotation.id, now_);
  Drain();
}

void SimulatedNode::FinishRotationAndLoseConnection(SimulatedWorker& worker) {
  CarryOut(worker, worker.rotations.front());
  worker.rotations.clear();
  LoseConnection(worker);
}

void SimulatedNode::Do(const SendActivateRefused& refused) {
  absl::StrAppend(&log_, "refused ", refused.session.value(), "\n");
  if (refused.message.empty() || refused.retry_after <= absl::ZeroDuration()) {
    Problem("a refusal without words or hint");
  }
  if (const auto found = workers_.find(refused.session); found != workers_.end()) {
    ++found->second.refusals;
    found->second.activation_deadline.reset();
  }
}

void SimulatedNode::Do(const SendKvPressure& pressure) {
  absl::StrAppend(&log_, "pressure ", pressure.session.value(), " ", pressure.target_slabs, "\n");
  if (const auto found = workers_.find(pressure.session); found != workers_.end()) {
    ++found->second.pressures;
  }
}

void SimulatedNode::Do(const SendLinkLimit& limit) {
  absl::StrAppend(&log_, "link limit ", limit.session.value(), " ", limit.bytes_per_second, "\n");
  const auto found = workers_.find(limit.session);
  if (found == workers_.end() || found->second.killed || !found->second.connected) {
    return Problem("a limit for a session that is not connected");
  }
  if (!std::isfinite(limit.bytes_per_second) || limit.bytes_per_second < 0 ||
      limit.bytes_per_second == found->second.link_limit) {
    Problem("a limit that is none or was told before");
  }
  found->second.link_limit = limit.bytes_per_second;
}

void SimulatedNode::Do(const SendTakeTurn& turn) {
  absl::StrAppend(&log_, "turn ", turn.session.value(), " ", turn.turn.value(), "\n");
  const auto found = workers_.find(turn.session);
  if (found == workers_.end() || found->second.killed || !found->second.connected) {
    return Problem("a turn for a session that is not connected");
  }
  for (const auto& [session, other] : workers_) {
    if (other.turn.has_value() && other.connected) Problem("two have a turn");
  }
  found->second.turn = turn.turn;
  found->second.turn_ending = false;
  ++found->second.turns;
}

void SimulatedNode::Do(const SendEndTurn& turn) {
  absl::StrAppend(&log_, "end turn ", turn.session.value(), "\n");
  const auto found = workers_.find(turn.session);
  if (found == workers_.end() || found->second.turn != turn.turn || found->second.turn_ending) {
    return Problem("a turn is asked back from one that does not have it");
  }
  if (turn.deadline <= now_) Problem("no time to end a turn");
  found->second.turn_ending = true;
}

void SimulatedNode::Do(const KillProcess& kill) {
  absl::StrAppend(&log_, "kill ", kill.session.value(), " ", kill.why, "\n");
  const auto found = workers_.find(kill.session);
  if (found == workers_.end()) return Problem("a kill of a process that is gone");
  if (std::exchange(found->second.killed, true)) Problem("killed twice");
  found->second.connected = false;
  found->second.activation_deadline.reset();
}

void SimulatedNode::Do(const CleanSlabs& clean) {
  absl::StrAppend(&log_, "clean ", clean.slabs.size(), "\n");
  for (const SlabId slab : clean.slabs) {
    if (shadow_[slab.value()].holder.has_value()) {
      Problem("a slab is cleaned while a process may touch it");
    }
    to_clean_.push_back(slab);
  }
}

void SimulatedNode::Do(const SessionEnded& ended) {
  absl::StrAppend(&log_, "ended ", ended.session.value(), "\n");
  if (workers_.contains(ended.session)) Problem("a session ended before its process");
}

void SimulatedNode::Do(const TransferFinished& transfer) {
  if (transfer.duration < absl::ZeroDuration()) Problem("a transfer took negative time");
  transfers_.push_back(transfer);
}

bool SimulatedNode::Complete(const SimulatedWorker& worker) const {
  const std::vector<ParameterStage>& stages = tenants_[worker.tenant.value()].stages;
  uint32_t needed = stages.back().first_slab + stages.back().slab_count;
  for (const int32_t stage : worker.rotation.stages) needed -= stages[stage].slab_count;
  return worker.Count(SlabRole::kParameter) == needed && worker.rotations.empty();
}

void SimulatedNode::NoteActivation(SimulatedWorker& worker) {
  if (!Complete(worker)) return;
  worker.activation_deadline.reset();
  worker.was_complete = true;
}

}  // namespace palimpsest
