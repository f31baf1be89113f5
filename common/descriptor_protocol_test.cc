#include "common/descriptor_protocol.h"

#include <algorithm>
#include <random>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace palimpsest {
namespace {

using ::testing::HasSubstr;

std::string RandomText(std::mt19937_64& random, size_t most) {
  std::string text(random() % (most + 1), '\0');
  for (char& c : text) c = static_cast<char>(random());
  return text;
}

std::vector<SlabEntry> RandomEntries(std::mt19937_64& random, size_t pieces) {
  std::vector<SlabEntry> entries(1 + random() % MaxPacketEntries(pieces));
  for (SlabEntry& entry : entries) {
    entry = {SlabId(static_cast<uint32_t>(random())), Epoch(random())};
  }
  return entries;
}

DescriptorPacket RandomPacket(std::mt19937_64& random) {
  switch (random() % 9) {
    case 0:
      return Hello{static_cast<uint32_t>(random()), RandomText(random, kMaxTenantBytes),
                   RandomText(random, kMaxSecretBytes)};
    case 1:
      return Welcome{Token::Random()};
    case 2:
      return Refused{RandomText(random, kMaxMessageBytes)};
    case 3:
      return Fetch{Token::Random()};
    case 4: {
      if (random() % 4 == 0) return Descriptors{DescriptorKind::kImage, 0, 1, {}};
      const auto pieces = static_cast<uint8_t>(1 + random() % kMaxSlabPieces);
      Descriptors packet{DescriptorKind::kSlabs, static_cast<uint32_t>(random() % 1000), 0,
                         RandomEntries(random, pieces), pieces};
      packet.total = packet.first + static_cast<uint32_t>(packet.entries.size() + random() % 100);
      return packet;
    }
    case 5: {
      const auto pieces = static_cast<uint8_t>(1 + random() % kMaxSlabPieces);
      return ReturnSlabs{RandomEntries(random, pieces), pieces};
    }
    case 6:
      return ReturnImage{std::string(32, static_cast<char>(random()))};
    case 7:
      return Accepted{};
    default:
      return Failed{RandomText(random, kMaxMessageBytes)};
  }
}

TEST(DescriptorProtocol, EveryPacketComesBackAsItWasSent) {
  std::mt19937_64 random(1);
  for (int i = 0; i < 5000; ++i) {
    const DescriptorPacket packet = RandomPacket(random);
    absl::StatusOr<std::string> bytes = EncodePacket(packet);
    ASSERT_TRUE(bytes.ok()) << bytes.status();
    ASSERT_LE(bytes->size(), kMaxPacketBytes);
    absl::StatusOr<DescriptorPacket> back = DecodePacket(*bytes);
    ASSERT_TRUE(back.ok()) << PacketName(packet) << ": " << back.status();
    EXPECT_EQ(*back, packet) << PacketName(packet);
  }
}

TEST(DescriptorProtocol, WhatDecodesIsTheOnlyEncoding) {
  std::mt19937_64 random(2);
  int decoded = 0;
  for (int i = 0; i < 20000; ++i) {
    std::string bytes = *EncodePacket(RandomPacket(random));
    // Change, cut or extend it.
    switch (random() % 3) {
      case 0:
        bytes[random() % std::min<size_t>(bytes.size(), 16)] = static_cast<char>(random());
        break;
      case 1:
        bytes.resize(random() % bytes.size());
        break;
      default:
        bytes += RandomText(random, 8);
    }
    absl::StatusOr<DescriptorPacket> packet = DecodePacket(bytes);
    if (!packet.ok()) continue;
    ++decoded;
    absl::StatusOr<std::string> again = EncodePacket(*packet);
    ASSERT_TRUE(again.ok()) << again.status();
    EXPECT_EQ(*again, bytes);
  }
  EXPECT_GT(decoded, 0);
}

TEST(DescriptorProtocol, EveryPrefixIsRefused) {
  std::mt19937_64 random(3);
  for (int i = 0; i < 50; ++i) {
    const std::string bytes = *EncodePacket(RandomPacket(random));
    for (size_t size = 0; size < bytes.size(); ++size) {
      EXPECT_TRUE(absl::IsInvalidArgument(DecodePacket(bytes.substr(0, size)).status()));
    }
  }
}

TEST(DescriptorProtocol, UnknownTypesAreRefused) {
  EXPECT_TRUE(absl::IsInvalidArgument(DecodePacket("").status()));
  EXPECT_TRUE(absl::IsInvalidArgument(DecodePacket(std::string(1, '\0')).status()));
  EXPECT_TRUE(absl::IsInvalidArgument(DecodePacket("\x0a").status()));
  EXPECT_TRUE(absl::IsInvalidArgument(DecodePacket("\xff").status()));
  EXPECT_TRUE(
      absl::IsInvalidArgument(DecodePacket(std::string(kMaxPacketBytes + 1, 'x')).status()));
}

TEST(DescriptorProtocol, EntriesAreBounded) {
  EXPECT_FALSE(EncodePacket(ReturnSlabs{}).ok());
  EXPECT_FALSE(EncodePacket(ReturnSlabs{std::vector<SlabEntry>(kMaxPacketDescriptors + 1)}).ok());
  EXPECT_TRUE(EncodePacket(ReturnSlabs{std::vector<SlabEntry>(64)}).ok());
  // A count of 65,535 in a short packet neither allocates nor decodes.
  EXPECT_FALSE(DecodePacket("\x06\x01\xff\xff").ok());
}

TEST(DescriptorProtocol, SlabsOfSeveralPiecesTravelWhole) {
  const auto encodes = [](size_t entries, uint8_t pieces) {
    const std::vector<SlabEntry> slabs(entries);
    const bool returned = EncodePacket(ReturnSlabs{slabs, pieces}).ok();
    const auto total = static_cast<uint32_t>(entries);
    EXPECT_EQ(EncodePacket(Descriptors{DescriptorKind::kSlabs, 0, total, slabs, pieces}).ok(),
              returned);
    return returned;
  };
  EXPECT_TRUE(encodes(126, 2));
  EXPECT_FALSE(encodes(127, 2));
  EXPECT_TRUE(encodes(31, 8));
  EXPECT_FALSE(encodes(32, 8));
  EXPECT_TRUE(encodes(3, kMaxSlabPieces));
  EXPECT_FALSE(encodes(1, kMaxSlabPieces + 1));
  EXPECT_FALSE(encodes(1, 0));
  EXPECT_FALSE(EncodePacket(Descriptors{DescriptorKind::kImage, 0, 1, {}, 2}).ok());
}

TEST(DescriptorProtocol, DescriptorsMustFitTheirTotal) {
  const std::vector<SlabEntry> two(2);
  EXPECT_TRUE(EncodePacket(Descriptors{DescriptorKind::kSlabs, 3, 5, two}).ok());
  EXPECT_FALSE(EncodePacket(Descriptors{DescriptorKind::kSlabs, 4, 5, two}).ok());
  EXPECT_FALSE(EncodePacket(Descriptors{DescriptorKind::kSlabs, 0xffffffff, 5, two}).ok());
  EXPECT_FALSE(EncodePacket(Descriptors{DescriptorKind::kImage, 0, 1, two}).ok());
  EXPECT_FALSE(EncodePacket(Descriptors{DescriptorKind::kImage, 0, 2, {}}).ok());
  EXPECT_FALSE(EncodePacket(Descriptors{static_cast<DescriptorKind>(9), 0, 2, two}).ok());
}

TEST(DescriptorProtocol, StringsAreBoundedAndMessagesCut) {
  Hello hello;
  hello.tenant = std::string(kMaxTenantBytes + 1, 't');
  EXPECT_THAT(std::string(EncodePacket(hello).status().message()), HasSubstr("tenant"));
  hello = {};
  hello.secret = std::string(kMaxSecretBytes + 1, 's');
  EXPECT_FALSE(EncodePacket(hello).ok());
  EXPECT_FALSE(EncodePacket(ReturnImage{"short"}).ok());

  absl::StatusOr<std::string> bytes = EncodePacket(Failed{std::string(100'000, 'm')});
  ASSERT_TRUE(bytes.ok());
  EXPECT_EQ(std::get<Failed>(*DecodePacket(*bytes)).message.size(), kMaxMessageBytes);
}

TEST(DescriptorProtocol, DescriptorCountsFollowFromThePacket) {
  EXPECT_EQ(DescriptorCount(Hello{}), 0);
  EXPECT_EQ(DescriptorCount(Descriptors{DescriptorKind::kImage, 0, 1, {}}), 1);
  EXPECT_EQ(DescriptorCount(Descriptors{DescriptorKind::kSlabs, 0, 2, std::vector<SlabEntry>(2)}),
            2);
  EXPECT_EQ(DescriptorCount(ReturnSlabs{std::vector<SlabEntry>(7)}), 7);
  EXPECT_EQ(DescriptorCount(ReturnSlabs{std::vector<SlabEntry>(7), 4}), 28);
  EXPECT_EQ(
      DescriptorCount(Descriptors{DescriptorKind::kSlabs, 0, 2, std::vector<SlabEntry>(2), 3}), 6);
  EXPECT_EQ(DescriptorCount(ReturnImage{}), 1);
}

}  // namespace
}  // namespace palimpsest
