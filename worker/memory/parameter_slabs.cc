#include "worker/memory/parameter_slabs.h"

#include <cstdio>
#include <cstdlib>

namespace palimpsest {
namespace {

void Require(bool condition, const char* what) {
  if (condition) return;
  std::fprintf(stderr, "illegal transition of a parameter slab: %s\n", what);
  std::abort();
}

}  // namespace

ParameterSlabs::ParameterSlabs(const std::vector<StageSpan>& stages, ParameterGateImpl* gate)
    : gate_(gate) {
  for (const StageSpan& span : stages) {
    const int stage = static_cast<int>(stages_.size());
    for (uint32_t i = 0; i < span.count; ++i) slabs_.push_back(Slab{.stage = stage});
    stages_.push_back({.not_restored = span.count, .missing = span.count, .slabs = span.count});
  }
  missing_ = size();
}

void ParameterSlabs::Change(RegionIndex index, State state, bool revoked) {
  Slab& slab = slabs_[index.value()];
  Stage& stage = stages_[slab.stage];
  const auto count = [&](int sign) {
    const bool missing = slab.state == State::kAbsent || slab.revoked;
    const bool restored = slab.state == State::kRestored;
    missing_ += sign * missing;
    stage.missing += sign * missing;
    restored_ += sign * restored;
    stage.not_restored += sign * !restored;
    stage.queued += sign * (slab.state == State::kQueued);
    stage.rotating += sign * (slab.state == State::kRotating);
  };
  count(-1);
  slab.state = state;
  slab.revoked = revoked;
  count(+1);
  using Open = ParameterGateImpl::Stage;
  gate_->Set(slab.stage,
             stage.missing > 0                    ? Open::kAbsent
             : stage.rotating == stage.slabs      ? Open::kRotating
             : stage.not_restored == 0            ? Open::kReady
             : stage.not_restored == stage.queued ? Open::kQueued
                                                  : Open::kComing,
             /*unproved=*/stage.queued > 0);
}

void ParameterSlabs::Promise(RegionIndex index) {
  Require(state(index) == State::kAbsent, "promise of one that is here");
  Change(index, State::kPromised, false);
}

void ParameterSlabs::Mapped(RegionIndex index) {
  Require(state(index) == State::kPromised, "mapped without a promise");
  Change(index, State::kMapped, revoked(index));
}

bool ParameterSlabs::BeginRestore(RegionIndex index) {
  if (state(index) != State::kMapped || revoked(index)) return false;
  Change(index, State::kRestoring, false);
  return true;
}

void ParameterSlabs::Queued(RegionIndex index) {
  Require(state(index) == State::kRestoring, "queued without beginning");
  Change(index, State::kQueued, revoked(index));
}

void ParameterSlabs::Restored(RegionIndex index) {
  Require(BeingWritten(index), "restored without beginning");
  Change(index, State::kRestored, revoked(index));
}

void ParameterSlabs::AbandonRestore(RegionIndex index) {
  if (BeingWritten(index)) Change(index, State::kMapped, revoked(index));
}

void ParameterSlabs::Unmapped(RegionIndex index) {
  Require(state(index) == State::kMapped || state(index) == State::kRestored ||
              state(index) == State::kRotating,
          "unmapped while not mapped or being restored");
  Change(index, State::kAbsent, false);
}

void ParameterSlabs::Rotate(RegionIndex index) {
  Require(state(index) == State::kAbsent, "an alias where a slab is");
  Change(index, State::kRotating, false);
}

void ParameterSlabs::Revoke(RegionIndex index) {
  Require(state(index) != State::kAbsent, "revoke of one that is not here");
  Change(index, state(index), true);
}

void ParameterSlabs::Unrevoke(RegionIndex index) { Change(index, state(index), false); }

void ParameterSlabs::LosePromises() {
  for (uint32_t i = 0; i < size(); ++i) {
    if (state(RegionIndex(i)) == State::kPromised) Change(RegionIndex(i), State::kAbsent, false);
  }
}

}  // namespace palimpsest
