#include "common/bytes.h"

#include <gtest/gtest.h>

namespace palimpsest {
namespace {

TEST(ParseBytes, KnownUnitsAreExact) {
  EXPECT_EQ(ParseBytes("4096").value(), Bytes(4096));
  EXPECT_EQ(ParseBytes(" 64 KiB ").value(), KiB(64));
  EXPECT_EQ(ParseBytes("1.5GiB").value(), MiB(1536));
  EXPECT_EQ(ParseBytes("2MB").value(), Bytes(2'000'000));
}

TEST(ParseBytes, AnythingElseIsRefused) {
  for (const char* text : {"", "x", "-1", "1.5", "nan", "inf", "1e30", "3 QiB", "0.3KiB"}) {
    EXPECT_FALSE(ParseBytes(text).ok()) << text;
  }
}

TEST(Bytes, PrintedSizesOfWholeUnitsParseBack) {
  for (Bytes b : {Bytes(0), Bytes(17), KiB(3), MiB(296), GiB(5), GiB(3072)}) {
    EXPECT_EQ(ParseBytes(b.ToString()).value(), b) << b;
  }
}

TEST(Bytes, CeilDivRoundsUp) {
  EXPECT_EQ(CeilDiv(Bytes(0), MiB(2)), 0);
  EXPECT_EQ(CeilDiv(Bytes(1), MiB(2)), 1);
  EXPECT_EQ(CeilDiv(MiB(2), MiB(2)), 1);
  EXPECT_EQ(RoundUp(MiB(3), MiB(2)), MiB(4));
}

}  // namespace
}  // namespace palimpsest
