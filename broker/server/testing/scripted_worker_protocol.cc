// What a scripted worker does with the broker's messages, and what it finds in the memory it gets.
#include <algorithm>
#include <cstdio>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "broker/server/testing/scripted_worker.h"

namespace palimpsest {
namespace {

bool AllBytesAre(int value, const Mapping& mapping) {
  const auto* const bytes = static_cast<const std::byte*>(mapping.data());
  return bytes[0] == static_cast<std::byte>(value) &&
         memcmp(bytes, bytes + 1, mapping.size() - 1) == 0;
}

}  // namespace

void ScriptedWorker::ReadLoop() {
  v1::BrokerMessage message;
  while (link_.Read(&message)) Receive(message);
  const absl::Status status = link_.Finish();
  MutexLock lock(&mu_);
  lost_ = status;
  changed_.SignalAll();
}

void ScriptedWorker::Receive(const v1::BrokerMessage& message) {
  {
    MutexLock lock(&mu_);
    if ((message.has_grant() && hold_ == Hold::kGrant) ||
        (message.has_revoke() && hold_ == Hold::kRevoke) ||
        (message.has_set_rotation() && hold_ == Hold::kRotation)) {
      held_messages_.push_back(message);
      return;
    }
  }
  React(message);
}

bool ScriptedWorker::HoldsAt(Hold at) {
  MutexLock lock(&mu_);
  return hold_ == at;
}

absl::Status ScriptedWorker::Answer(Hold at, const v1::WorkerMessage& answer) {
  {
    MutexLock lock(&mu_);
    if (hold_ == at) {
      held_answers_.push_back(answer);
      return absl::OkStatus();
    }
  }
  return Send(answer);
}

void ScriptedWorker::HoldAt(Hold hold) {
  MutexLock lock(&mu_);
  hold_ = hold;
}

absl::Status ScriptedWorker::GoOn() {
  std::vector<v1::BrokerMessage> messages;
  std::vector<v1::WorkerMessage> answers;
  {
    MutexLock lock(&mu_);
    hold_ = Hold::kNowhere;
    messages.swap(held_messages_);
    answers.swap(held_answers_);
  }
  for (const v1::WorkerMessage& answer : answers) {
    if (absl::Status status = Send(answer); !status.ok()) return status;
  }
  for (const v1::BrokerMessage& message : messages) React(message);
  return absl::OkStatus();
}

size_t ScriptedWorker::held() {
  MutexLock lock(&mu_);
  return held_messages_.size() + held_answers_.size();
}

void ScriptedWorker::React(const v1::BrokerMessage& message) {
  if (message.has_grant()) {
    bool maps = false;
    {
      MutexLock lock(&mu_);
      last_token_ = message.grant().token();
      maps = maps_;
    }
    if (maps) {
      const absl::Status mapped = Map(message.grant());
      if (!mapped.ok()) fprintf(stderr, "scripted worker: %s\n", mapped.ToString().c_str());
    }
    MutexLock lock(&mu_);
    ++grants_;
  } else if (message.has_revoke()) {
    AnswerRevoke(message.revoke());
    MutexLock lock(&mu_);
    ++revokes_;
  } else if (message.has_set_rotation()) {
    Rotate(message.set_rotation());
  } else if (message.has_activate_refused()) {
    MutexLock lock(&mu_);
    ++refused_;
  } else if (message.has_kv_pressure()) {
    MutexLock lock(&mu_);
    ++pressure_;
  }
  changed_.SignalAll();
}

absl::Status ScriptedWorker::Map(const v1::Grant& grant) {
  std::vector<SlabEntry> entries;
  absl::StatusOr<std::vector<UniqueFd>> memory = link_.Fetch(grant.token(), &entries);
  if (!memory.ok()) return memory.status();
  if (static_cast<int>(memory->size()) != grant.slabs_size()) {
    return absl::InternalError("other descriptors than were granted");
  }
  {
    MutexLock lock(&mu_);
    for (int i = 0; i < grant.slabs_size(); ++i) {
      const v1::GrantedSlab& slab = grant.slabs(i);
      if (entries[i].slab_id.value() != slab.slab_id() ||
          entries[i].epoch.value() != slab.epoch()) {
        return absl::InternalError("descriptors in another order than was granted");
      }
      absl::StatusOr<Mapping> mapping = Mapping::Map(
          (*memory)[i].get(), Bytes(static_cast<int64_t>(slab_bytes_)), MapAccess::kReadWrite);
      if (!mapping.ok()) return mapping.status();
      if (mark_.has_value()) {
        if (!AllBytesAre(0, *mapping)) came_dirty_ = slab.slab_id();
        memset(mapping->data(), *mark_, mapping->size());
      }
      slabs_[slab.slab_id()] = Held{slab.epoch(), grant.role(), slab.region_index(),
                                    std::move((*memory)[i]), *std::move(mapping)};
    }
  }
  v1::WorkerMessage mapped;
  mapped.mutable_grant_mapped()->set_grant_id(grant.grant_id());
  return Answer(Hold::kMapped, mapped);
}

void ScriptedWorker::AnswerRevoke(const v1::Revoke& revoke) {
  v1::WorkerMessage answer;
  answer.mutable_revoke_done()->set_revoke_id(revoke.revoke_id());
  {
    MutexLock lock(&mu_);
    if (manners_ == Manners::kSilent) return;
    for (auto it = slabs_.begin(); it != slabs_.end();) {
      auto here = it++;
      const auto& wanted = revoke.region_indexes();
      const bool goes =
          here->second.role == revoke.role() &&
          (revoke.role() == v1::SLAB_ROLE_KV
               ? answer.revoke_done().slab_ids_size() < static_cast<int>(revoke.kv_slabs())
               : std::find(wanted.begin(), wanted.end(), here->second.region_index) !=
                     wanted.end());
      if (!goes) continue;
      answer.mutable_revoke_done()->add_slab_ids(here->first);
      if (manners_ == Manners::kLiar) kept_[here->first] = std::move(here->second);
      slabs_.erase(here);
    }
  }
  if (!HoldsAt(Hold::kRevokedPart)) {
    (void)Answer(Hold::kRevoked, answer);
    return;
  }
  auto& rest = *answer.mutable_revoke_done()->mutable_slab_ids();
  v1::WorkerMessage part;
  part.mutable_revoke_done()->set_revoke_id(revoke.revoke_id());
  part.mutable_revoke_done()->set_more(true);
  if (!rest.empty()) part.mutable_revoke_done()->add_slab_ids(rest[0]);
  if (!rest.empty()) rest.erase(rest.begin());
  (void)Send(part);
  (void)Answer(Hold::kRevokedPart, answer);
}

void ScriptedWorker::Rotate(const v1::SetRotation& change) {
  {
    MutexLock lock(&mu_);
    if (manners_ == Manners::kSilent) return;
    for (const v1::MovedSlab& move : change.moves()) {
      if (move.role() == v1::SLAB_ROLE_UNSPECIFIED) {
        slabs_.erase(move.slab_id());
        continue;
      }
      slabs_[move.slab_id()].role = move.role();
      slabs_[move.slab_id()].region_index = move.region_index();
    }
    rotation_ = change.rotation();
  }
  v1::WorkerMessage answer;
  answer.mutable_rotation_done()->set_rotation_id(change.rotation_id());
  (void)Answer(Hold::kRotated, answer);
}

void ScriptedWorker::Mark(int value) {
  Fill(value);
  MutexLock lock(&mu_);
  mark_ = value;
}

absl::Status ScriptedWorker::CheckMarks() {
  MutexLock lock(&mu_);
  if (came_dirty_.has_value()) {
    return absl::DataLossError(absl::StrCat("slab ", *came_dirty_, " came with another's bytes"));
  }
  for (const auto& [id, held] : slabs_) {
    if (AllBytesAre(mark_.value_or(0), held.mapping)) continue;
    return absl::DataLossError(absl::StrCat("slab ", id, " has other bytes than were written"));
  }
  return absl::OkStatus();
}

}  // namespace palimpsest
