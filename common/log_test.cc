#include "common/log.h"

#include "common/bytes.h"
#include "common/ids.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace palimpsest {
namespace {

TEST(FormatLogLine, FieldsOfEveryType) {
  EXPECT_EQ(FormatLogLine("slabs revoked", {{"tenant", "alpha"},
                                            {"slabs", 12},
                                            {"slab", SlabId(7)},
                                            {"size", MiB(2)},
                                            {"took", absl::Milliseconds(1500)},
                                            {"pinned", true},
                                            {"ratio", 0.5},
                                            {"status", absl::NotFoundError("no such slab")}}),
            "slabs revoked tenant=alpha slabs=12 slab=7 size=\"2 MiB\" took=1.5 pinned=true "
            "ratio=0.5 status=\"NOT_FOUND: no such slab\"");
}

TEST(FormatLogLine, HostileValuesForgeNeitherFieldsNorLines) {
  EXPECT_EQ(FormatLogLine("refused", {{"tenant", "a b=c\n\"error"}}),
            "refused tenant=\"a b=c\\n\\\"error\"");
  EXPECT_EQ(FormatLogLine("refused", {{"tenant", ""}}), "refused tenant=\"\"");
  EXPECT_EQ(FormatLogLine("two\nlines", {}), "two\\nlines");
  EXPECT_EQ(FormatLogLine("x", {{"text", "grüße"}}), "x text=grüße");
}

TEST(Log, WritesFromItsLevelOn) {
  InitLog("broker", LogLevel::kWarning);
  ::testing::internal::CaptureStderr();
  Log(LogLevel::kInfo, "quiet");
  Log(LogLevel::kWarning, "loud {} %s", {{"n", 1}});
  const std::string text = ::testing::internal::GetCapturedStderr();
  EXPECT_THAT(text, ::testing::MatchesRegex("[-0-9:.TZ]+ warning broker: loud \\{\\} %s n=1\n"));
}

}  // namespace
}  // namespace palimpsest
