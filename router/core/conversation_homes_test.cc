#include "router/core/conversation_homes.h"

#include "gtest/gtest.h"

namespace palimpsest::router {
namespace {

TEST(ConversationHomes, ForgetsTheOneThatWasSeenLongestAgo) {
  ConversationHomes homes(2);
  homes.Set(1, WorkerId(7));
  homes.Set(2, WorkerId(8));
  homes.Set(1, WorkerId(9));
  homes.Set(3, WorkerId(8));
  EXPECT_EQ(homes.size(), 2u);
  EXPECT_EQ(homes.Find(1), WorkerId(9));
  EXPECT_EQ(homes.Find(2), std::nullopt);
  EXPECT_EQ(homes.Find(3), WorkerId(8));
}

}  // namespace
}  // namespace palimpsest::router
