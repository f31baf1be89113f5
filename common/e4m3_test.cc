#include "common/e4m3.h"

#include <bit>
#include <cmath>
#include <cstdint>
#include <random>

#include "gtest/gtest.h"

namespace palimpsest {
namespace {

// By the definition of the format, in doubles.
double Plain(int code) {
  const int exponent = code >> 3 & 15, mantissa = code & 7;
  const double magnitude =
      exponent == 0 ? std::ldexp(mantissa / 8.0, -6) : std::ldexp(1 + mantissa / 8.0, exponent - 7);
  return code & 0x80 ? -magnitude : magnitude;
}

// The nearest of all codes of the sign; the even one of two that are as near.
uint8_t Nearest(float x) {
  const int sign = std::signbit(x) ? 0x80 : 0;
  int best = sign;
  for (int code = sign; code < sign + 0x7f; ++code) {
    const double here = std::abs(Plain(code) - x), there = std::abs(Plain(best) - x);
    if (here < there || (here == there && code % 2 == 0)) best = code;
  }
  return static_cast<uint8_t>(best);
}

TEST(E4m3, EveryCodeIsItsNumberAndComesBack) {
  for (int code = 0; code < 256; ++code) {
    const float x = E4m3ToFloat(static_cast<uint8_t>(code));
    if ((code & 0x7f) == 0x7f) {
      EXPECT_TRUE(std::isnan(x));
    } else {
      EXPECT_EQ(x, Plain(code)) << code;
    }
    EXPECT_EQ(std::signbit(x), code >= 128) << code;
    EXPECT_EQ(FloatToE4m3(x), code);
  }
}

TEST(E4m3, NumbersBetweenCodesGoToTheNearest) {
  for (int code = 0; code < 0x7e; ++code) {
    const auto low = static_cast<float>(Plain(code)), high = static_cast<float>(Plain(code + 1));
    const float middle = (low + high) / 2;
    for (const float x : {std::nextafter(low, high), std::nextafter(middle, low), middle,
                          std::nextafter(middle, high), std::nextafter(high, low)}) {
      EXPECT_EQ(FloatToE4m3(x), Nearest(x)) << x;
      EXPECT_EQ(FloatToE4m3(-x), Nearest(-x)) << -x;
    }
  }
}

TEST(E4m3, RandomFloatsGoToTheNearest) {
  std::mt19937 random(7);
  for (int i = 0; i < 5000; ++i) {
    const float any = std::bit_cast<float>(static_cast<uint32_t>(random()));
    const float near = std::ldexp(static_cast<float>(random()) * 0x1p-31f - 1.0f,
                                  static_cast<int>(random() % 24) - 13);
    EXPECT_EQ(FloatToE4m3(near), Nearest(near)) << near;
    if (std::isnan(any)) continue;
    EXPECT_EQ(FloatToE4m3(any), Nearest(any)) << any;
  }
}

TEST(E4m3, WhatIsTooLargeSaturates) {
  for (const float x : {448.0f, 463.9f, 464.0f, 480.0f, 1e30f, INFINITY}) {
    EXPECT_EQ(E4m3ToFloat(FloatToE4m3(x)), 448.0f) << x;
    EXPECT_EQ(E4m3ToFloat(FloatToE4m3(-x)), -448.0f) << x;
  }
  EXPECT_EQ(FloatToE4m3(NAN) & 0x7f, 0x7f);
}

}  // namespace
}  // namespace palimpsest
