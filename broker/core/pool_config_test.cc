#include "broker/core/pool_config.h"

#include <random>
#include <string>
#include <vector>

#include "gtest/gtest.h"

namespace palimpsest {
namespace {

TenantDemand Demand(const std::string& name, uint32_t floor, uint32_t quota, bool pinned = false) {
  return TenantDemand{.config = {.name = name,
                                 .priority = 0,
                                 .pinned = pinned,
                                 .floor_slabs = floor,
                                 .quota_slabs = quota,
                                 .sequence_slabs = 4,
                                 .workspace_slabs = 1},
                      .image_slabs = 20};
}

TEST(ValidatePool, AcceptsFloorsThatFitTogether) {
  EXPECT_TRUE(
      ValidatePool(64, {Demand("a", 25, 64), Demand("b", 30, 40), Demand("c", 0, 25)}).ok());
}

struct Case {
  const char* name;
  uint32_t pool;
  std::vector<TenantDemand> tenants;
  const char* message;
};

TEST(ValidatePool, NamesNumbersAndRemedy) {
  const std::vector<Case> cases = {
      {"floors exceed the pool",
       50,
       {Demand("a", 25, 50), Demand("b", 26, 50)},
       "the floors add up to 51 slabs (a 25, b 26), the pool has 50"},
      {"no room for a workspace beside the floors",
       50,
       {Demand("a", 25, 50), Demand("b", 25, 50), Demand("c", 0, 50)},
       "the floors add up to 51 slabs (a 25, b 25, c 1 of workspace), the pool has 50"},
      {"floor below what serving takes",
       64,
       {Demand("a", 24, 64)},
       "has a floor of 24 slabs but needs 25 slabs (parameters 20 + workspace 1 + one longest "
       "sequence 4)"},
      {"does not fit its quota", 64, {Demand("a", 0, 24)}, "its quota is 24: raise the quota"},
      {"does not fit the pool", 24, {Demand("a", 0, 24)}, "the pool has 24: enlarge the pool"},
      {"quota above the pool", 64, {Demand("a", 0, 65)}, "a quota of 65 slabs, the pool has 64"},
      {"floor above the quota", 64, {Demand("a", 31, 30)}, "a floor of 31 slabs above its quota"},
      {"pinned without floor", 64, {Demand("a", 0, 30, true)}, "is pinned without a floor"},
      {"same name twice", 64, {Demand("a", 0, 30), Demand("a", 0, 30)}, "configured twice"},
      {"no name", 64, {Demand("", 0, 30)}, "has no name"},
      {"empty pool", 0, {}, "the pool has no slabs"},
  };
  for (const Case& c : cases) {
    const absl::Status status = ValidatePool(c.pool, c.tenants);
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << c.name;
    EXPECT_NE(std::string(status.message()).find(c.message), std::string::npos)
        << c.name << ": " << status;
  }
}

TEST(ValidatePool, ParametersThatStayMustFitTogether) {
  const std::vector<TenantDemand> tenants = {Demand("a", 30, 64), Demand("b", 0, 64)};
  const auto message = [&](uint32_t pool, MemoryPolicy policy) {
    return std::string(ValidatePool(pool, tenants, policy).message());
  };
  EXPECT_TRUE(ValidatePool(64, tenants, MemoryPolicy::kRemap).ok());
  EXPECT_TRUE(ValidatePool(64, tenants, MemoryPolicy::kRecompute).ok());
  EXPECT_TRUE(ValidatePool(64, tenants, MemoryPolicy::kSwap).ok());
  EXPECT_NE(message(64, MemoryPolicy::kStatic).find("\"b\" has no floor"), std::string::npos);
  const std::vector<TenantDemand> many = {Demand("a", 30, 54), Demand("b", 0, 54)};
  EXPECT_TRUE(ValidatePool(54, many, MemoryPolicy::kRemap).ok());
  const absl::Status status = ValidatePool(54, many, MemoryPolicy::kSwap);
  EXPECT_NE(std::string(status.message())
                .find("take 51 slabs (a 30, b 21 of parameters and workspace) and leave 3"),
            std::string::npos)
      << status;
}

TEST(ConfigUnder, RemapChangesNothing) {
  const TenantDemand tenant = Demand("a", 30, 64);
  const TenantConfig config = ConfigUnder(MemoryPolicy::kRemap, tenant);
  EXPECT_EQ(config.floor_slabs, 30);
  EXPECT_EQ(config.quota_slabs, 64);
  EXPECT_FALSE(config.pinned);
}

TEST(ConfigUnder, ParametersStayElsewhere) {
  for (const MemoryPolicy policy : {MemoryPolicy::kRecompute, MemoryPolicy::kSwap}) {
    EXPECT_TRUE(ConfigUnder(policy, Demand("a", 30, 64)).pinned);
    EXPECT_EQ(ConfigUnder(policy, Demand("a", 30, 64)).floor_slabs, 30);
    EXPECT_EQ(ConfigUnder(policy, Demand("a", 30, 64)).quota_slabs, 64);
    EXPECT_EQ(ConfigUnder(policy, Demand("b", 0, 64)).floor_slabs, 21);
  }
  EXPECT_TRUE(ConfigUnder(MemoryPolicy::kStatic, Demand("a", 30, 64)).pinned);
  EXPECT_EQ(ConfigUnder(MemoryPolicy::kStatic, Demand("a", 30, 64)).quota_slabs, 30);
}

TEST(WithDefaultFloors, EveryTenantCanServeWhereThatFits) {
  const auto unsaid = [](const std::string& name, bool pinned = false) {
    TenantDemand tenant = Demand(name, 0, 64, pinned);
    tenant.floor_unsaid = true;
    return tenant;
  };
  const TenantDemand floored = Demand("floored", 30, 64), best_effort = Demand("effort", 0, 64);
  struct Case {
    const char* name;
    uint32_t pool;
    std::vector<TenantDemand> tenants;
    std::vector<uint32_t> floors;
  };
  const std::vector<Case> cases = {
      {"image, workspace and one longest sequence", 64, {unsaid("a")}, {25}},
      {"all that say nothing", 50, {unsaid("a"), unsaid("b")}, {25, 25}},
      {"or none: one slab is missing", 49, {unsaid("a"), unsaid("b")}, {0, 0}},
      {"beside floors of others", 55, {floored, unsaid("a")}, {30, 25}},
      {"which take the room", 54, {floored, unsaid("a")}, {30, 0}},
      {"best effort that is asked for stays, with its workspace",
       26,
       {best_effort, unsaid("a")},
       {0, 25}},
      {"not without it", 25, {best_effort, unsaid("a")}, {0, 0}},
      {"pinned, too", 25, {unsaid("a", true)}, {25}},
      {"nobody", 25, {}, {}},
  };
  for (const Case& c : cases) {
    const std::vector<TenantDemand> got = WithDefaultFloors(c.pool, c.tenants);
    ASSERT_EQ(got.size(), c.floors.size()) << c.name;
    for (size_t i = 0; i < got.size(); ++i) {
      EXPECT_EQ(got[i].config.floor_slabs, c.floors[i]) << c.name << ": " << got[i].config.name;
      EXPECT_EQ(got[i].config.floor_by_default, c.tenants[i].floor_unsaid && c.floors[i] > 0)
          << c.name << ": " << got[i].config.name;
    }
  }
}

// Whatever the models' sizes: what may be promised can be kept.
TEST(WithDefaultFloors, NeverMakeAPoolInvalid) {
  std::mt19937 random(1);
  const auto below = [&random](uint32_t n) { return static_cast<uint32_t>(random() % n); };
  int given = 0;
  for (int round = 0; round < 2000; ++round) {
    const uint32_t pool = 40 + below(200);
    std::vector<TenantDemand> tenants;
    for (uint32_t i = 0; i < 1 + below(5); ++i) {
      TenantDemand tenant = Demand(std::to_string(i), below(2) * (30 + below(60)), pool);
      tenant.image_slabs = 1 + below(60);
      tenant.config.sequence_slabs = 1 + below(20);
      tenant.config.workspace_slabs = below(4);
      tenant.floor_unsaid = tenant.config.floor_slabs == 0 && below(3) > 0;
      tenants.push_back(tenant);
    }
    const std::vector<TenantDemand> floored = WithDefaultFloors(pool, tenants);
    for (const TenantDemand& tenant : floored) given += tenant.config.floor_by_default;
    EXPECT_EQ(ValidatePool(pool, floored).ok(), ValidatePool(pool, tenants).ok()) << round;
  }
  EXPECT_GT(given, 500);
}

TEST(ValidatePool, SumsDoNotOverflow) {
  EXPECT_FALSE(ValidatePool(64, {Demand("a", 0xffffffff, 0xffffffff), Demand("b", 40, 64)}).ok());
}

}  // namespace
}  // namespace palimpsest
