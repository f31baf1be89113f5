#include "broker/core/layer_supply.h"

#include <algorithm>
#include <array>
#include <cmath>

#include "broker/core/link_budget.h"

namespace palimpsest {
namespace {

// Blocks that take less than this of the link do not count as copies under way.
constexpr double kTrafficThatCounts = 0.01;

bool Rotatable(const Session& session) {
  return session.connected() && session.rotation.layers.layers > 0;
}

// The tenant runs, all of its parameters are there or rotate, and nothing moves.
bool MayGive(const Session& session, absl::Time now) {
  return !session.config.pinned && session.load.active && session.runs() &&
         !session.SilentAt(now) && session.missing() == 0 && session.ParametersAtRest() &&
         session.rotation.spare() == 0 && now >= session.irrevocable_until;
}

RotationCost WholeLinkCost(const Session& session, const SupplyRules& rules) {
  const RotatableLayers& layers = session.rotation.layers;
  const double inside = static_cast<double>(layers.slabs) * layers.layers / session.image_slabs();
  return {
      .layers = layers.layers,
      .layer_bytes = rules.slab_bytes * static_cast<int64_t>(layers.slabs),
      .stage_slabs = static_cast<int32_t>(layers.slabs),
      .step_seconds =
          BindingStepSeconds({.decode_seconds = absl::ToDoubleSeconds(session.load.decode_step),
                              .prefill_seconds = absl::ToDoubleSeconds(session.load.prefill_step),
                              .prefill_share = session.load.prefill_share}),
      .outside_share = 1.0 - inside,
      .link_bytes_per_second = session.load.image_bytes_per_second,
      .cap_freed =
          rules.rotation.enabled ? static_cast<int32_t>(rules.rotation.cap * layers.layers) : 0};
}

// All sessions copy over one link, each piece of a slab over its own GPU's; but those whose image
// has a copy on another GPU over that one's.
enum Link : size_t { kHostLink, kPeerLink, kLinks };

Link LinkOf(const Session& session) { return session.load.image_on_peer ? kPeerLink : kHostLink; }

LinkUse UseOf(absl::Span<Session* const> sessions, Link link, absl::Time now) {
  LinkUse use;
  for (const Session* session : sessions) {
    if (LinkOf(*session) == link) {
      use.bytes_per_second = std::max(use.bytes_per_second, session->load.image_bytes_per_second);
    }
    if (!session->connected()) continue;
    use.restores_expected =
        use.restores_expected ||
        (LinkOf(*session) == link && (session->missing() > 0 || session->Restoring()));
    if (link == kHostLink && !session->SilentAt(now)) {
      use.block_bytes_per_second += session->blocks.bytes_per_second();
    }
  }
  return use;
}

struct Tenants {
  std::vector<Session*> sessions;
  std::vector<RotatingTenant> tenants;
  std::array<double, kLinks> link_shares = {};
};

Tenants Collect(absl::Span<Session* const> sessions, const SupplyRules& rules, absl::Time now) {
  Tenants all;
  for (Session* session : sessions) {
    if (!Rotatable(*session)) continue;
    all.sessions.push_back(session);
    all.tenants.push_back({.priority = session->config.priority,
                           .whole_link = WholeLinkCost(*session, rules),
                           .freed = session->rotation.now.freed(),
                           .slots = session->rotation.now.slots,
                           .link = LinkOf(*session)});
  }
  for (const Link link : {kHostLink, kPeerLink}) {
    all.link_shares[link] = RotationShare(UseOf(sessions, link, now), LinkBudgetRules());
  }
  return all;
}

RotationInputs InputsOf(const Tenants& all, size_t index) {
  const RotatingTenant& tenant = all.tenants[index];
  const double share = ShareLeft(all.tenants, all.link_shares, index);
  return {.cost = WithShare(tenant.whole_link, share),
          .link_share = share,
          .freed_before = tenant.freed,
          .slots_before = tenant.slots,
          .choice = {}};
}

// Lowers caps to what each tenant may give to the requester; who may give anything.
std::vector<bool> Limit(Tenants& all, const Session& requester, LayersOf whose, absl::Time now) {
  std::vector<bool> may_give;
  for (size_t i = 0; i < all.tenants.size(); ++i) {
    const Session& session = *all.sessions[i];
    RotatingTenant& tenant = all.tenants[i];
    int32_t& cap = tenant.whole_link.cap_freed;
    const bool asked = whose == LayersOf::kRequester
                           ? &session == &requester
                           : session.config.priority <= requester.config.priority;
    may_give.push_back(asked && MayGive(session, now));
    if (!may_give.back()) {
      cap = tenant.freed;
    } else if (session.guaranteed() && !session.config.floor_by_default && &session != &requester) {
      const uint32_t layers = session.AboveFloor() / session.rotation.layers.slabs;
      cap = std::min(cap, tenant.freed + static_cast<int32_t>(layers));
    }
  }
  return may_give;
}

}  // namespace

RotationRules RulesOf(const RotationOptions& options) { return {.slots = options.slots}; }

std::vector<LayerOffer> PlanLayers(absl::Span<Session* const> sessions, const Session& requester,
                                   LayersOf whose, uint32_t need, const SupplyRules& rules,
                                   absl::Time now) {
  if (!rules.rotation.enabled) return {};
  Tenants all = Collect(sessions, rules, now);
  std::vector<bool> may_give = Limit(all, requester, whose, now);
  if (std::count(may_give.begin(), may_give.end(), true) == 0) return {};
  const RotationRules how = RulesOf(rules.rotation);
  std::vector<LayerOffer> offers;
  int64_t slabs = 0;
  for (const RotationTake& take : PlanRotations(all.tenants, all.link_shares, how, need)) {
    LayerOffer offer{.victim = all.sessions[take.tenant],
                     .rotation = {},
                     .slabs = static_cast<uint32_t>(take.slabs),
                     .inputs = InputsOf(all, take.tenant)};
    const RotatableLayers& layers = offer.victim->rotation.layers;
    offer.rotation =
        EvenRotation(layers.first_stage, layers.layers, take.choice.freed, take.choice.slots);
    offer.inputs.choice = take.choice;
    offer.inputs.link_share = take.link_share;
    offers.push_back(std::move(offer));
    slabs += take.slabs;
    may_give[take.tenant] = false;
  }
  for (size_t i = 0; i < may_give.size() && slabs < need; ++i) {
    if (!may_give[i]) continue;
    LayerOffer offer{.victim = all.sessions[i], .rotation = {}, .inputs = InputsOf(all, i)};
    RotationCost careful = offer.inputs.cost;
    careful.step_seconds *= 1.0 - how.headroom;
    offer.inputs.choice = ChooseRotation(careful, how.slots);
    offers.push_back(std::move(offer));
  }
  return offers;
}

RemapCandidate CandidateOf(const LayerOffer& offer, absl::Time now) {
  return {.tenant = *offer.victim->tenant,
          .rule = RemapRule::kRotation,
          .outcome = offer.slabs > 0 ? RemapOutcome::kTaken : RemapOutcome::kNotHidden,
          .slabs = offer.slabs,
          .priority = offer.victim->config.priority,
          .idle = now - offer.victim->last_active,
          .rotation = offer.inputs};
}

RotationInputs GrantedRotation(absl::Span<Session* const> sessions, const Session& session,
                               const SupplyRules& rules, absl::Time now) {
  const Tenants all = Collect(sessions, rules, now);
  const auto found = std::find(all.sessions.begin(), all.sessions.end(), &session);
  return InputsOf(all, static_cast<size_t>(found - all.sessions.begin()));
}

std::vector<double> BackgroundLimitsOf(absl::Span<Session* const> sessions,
                                       const SupplyRules& rules, absl::Duration patience,
                                       absl::Time now) {
  const double link = UseOf(sessions, kHostLink, now).bytes_per_second;
  const double headroom = RulesOf(rules.rotation).headroom;
  std::vector<LinkUser> users;
  for (const Session* session : sessions) {
    LinkUser user;
    const SessionRotation& rotation = session->rotation;
    const bool here = session->connected() && LinkOf(*session) == kHostLink;
    // Layers rotate as long as steps run.
    if (here && session->load.active && session->runs() && rotation.now.freed() > 0) {
      const double needed =
          ShareNeeded(WholeLinkCost(*session, rules), rotation.now.freed(), rotation.now.slots);
      user.promised = std::min(needed / (1.0 - headroom), 1.0);
    }
    user.copies =
        session->connected() &&
        (session->Restoring() || session->blocks.bytes_per_second() > kTrafficThatCounts * link);
    const Bytes image = rules.slab_bytes * static_cast<int64_t>(session->image_slabs());
    user.least_bytes_per_second =
        static_cast<double>(image.count()) / absl::ToDoubleSeconds(patience);
    users.push_back(user);
  }
  std::vector<double> limits = BackgroundLimits(users, link, LinkBudgetRules());
  for (double& limit : limits) limit = std::isinf(limit) ? 0.0 : limit;
  return limits;
}

}  // namespace palimpsest
