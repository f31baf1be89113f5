#include "broker/tier/encryption/tenant_cipher.h"

#include <algorithm>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "absl/strings/escaping.h"
#include "gtest/gtest.h"

namespace palimpsest {
namespace {

SecretKey Key(uint8_t byte) {
  SecretKey key;
  std::fill_n(key.data(), kSecretKeyBytes, byte);
  return key;
}

std::vector<std::byte> Content(size_t size, uint64_t seed = 1) {
  std::mt19937_64 random(seed);
  std::vector<std::byte> bytes(size);
  for (std::byte& byte : bytes) byte = static_cast<std::byte>(random());
  return bytes;
}

BlockRecord Record(size_t length, size_t tokens = 16) {
  BlockRecord record = {.id = {.key = {11, 12}, .parent = {13, 14}, .tokens = {}, .tenant = "anna"},
                        .length = Bytes(static_cast<int64_t>(length)),
                        .checksum = 15,
                        .expiry = absl::FromUnixSeconds(1000)};
  for (size_t i = 0; i < tokens; ++i) record.id.tokens.push_back(static_cast<TokenId>(i * 3));
  return record;
}

std::vector<std::byte> Seal(const TenantCipher& cipher, const BlockRecord& record,
                            const std::vector<std::byte>& content) {
  std::vector<std::byte> sealed(TenantCipher::SealedLength(record.length).count());
  cipher.SealBytes(record, content, absl::MakeSpan(sealed));
  return sealed;
}

// Nothing if they are refused.
std::vector<std::byte> Open(const TenantCipher& cipher, const BlockRecord& record,
                            const std::vector<std::byte>& sealed) {
  std::vector<std::byte> opened(record.length.count(), std::byte{0x55});
  const absl::Status status = cipher.OpenBytes(record, sealed, absl::MakeSpan(opened));
  if (status.ok()) return opened;
  EXPECT_TRUE(absl::IsDataLoss(status)) << status;
  EXPECT_EQ(opened, std::vector<std::byte>(opened.size()));
  return {};
}

// From the specification, https://c2sp.org/XAES-256-GCM.
TEST(Aead, GivesTheVectorsOfItsSpecification) {
  struct Vector {
    uint8_t key;
    const char* bound;
    const char* sealed;
  };
  for (const auto& [key, bound, sealed] :
       {Vector{1, "", "ce546ef63c9cc60765923609b33a9a1974e96e52daf2fcf7075e2271"},
        Vector{3, "c2sp.org/XAES-256-GCM",
               "986ec1832593df5443a179437fd083bf3fdb41abd740a21f71eb769d"}}) {
    const std::string plain = "XAES-256-GCM", nonce_text = "ABCDEFGHIJKLMNOPQRSTUVWX";
    Aead::Nonce nonce;
    std::copy(nonce_text.begin(), nonce_text.end(), nonce.begin());
    std::string out(plain.size(), '\0');
    const Aead::Tag tag =
        Aead(Key(key)).Seal(nonce, bound, {reinterpret_cast<const std::byte*>(plain.data()), 12},
                            {reinterpret_cast<std::byte*>(out.data()), 12});
    out.append(reinterpret_cast<const char*>(tag.data()), tag.size());
    EXPECT_EQ(absl::BytesToHexString(out), sealed);
  }
}

TEST(TenantCipher, OpensWhatItSealedOfAnyLength) {
  const TenantCipher cipher(Key(1));
  for (const size_t length : {1, 15, 16, 17, 4055, 4056, 4057, 4096, 10000, 300000}) {
    const BlockRecord record = Record(length, length % 50);
    const std::vector<std::byte> content = Content(length);
    const std::vector<std::byte> sealed = Seal(cipher, record, content);
    EXPECT_EQ(sealed.size() % 4096, 0);
    EXPECT_EQ(Open(cipher, record, sealed), content) << length;
  }
}

TEST(TenantCipher, RefusesBytesOfWhichOneWasChanged) {
  const TenantCipher cipher(Key(1));
  const BlockRecord record = Record(3000);
  std::vector<std::byte> sealed = Seal(cipher, record, Content(3000));
  for (std::byte& byte : sealed) {
    byte ^= std::byte{0x10};
    EXPECT_TRUE(Open(cipher, record, sealed).empty()) << &byte - sealed.data();
    byte ^= std::byte{0x10};
  }
  EXPECT_EQ(Open(cipher, record, sealed), Content(3000));
}

TEST(TenantCipher, BindsBytesToEverythingThatMakesTheBlock) {
  const TenantCipher cipher(Key(1));
  const BlockRecord record = Record(3000);
  const std::vector<std::byte> sealed = Seal(cipher, record, Content(3000));
  const auto refused = [&](auto change) {
    BlockRecord other = record;
    change(other);
    return Open(cipher, other, sealed).empty();
  };
  EXPECT_TRUE(refused([](BlockRecord& other) { ++other.id.key.low; }));
  EXPECT_TRUE(refused([](BlockRecord& other) { ++other.id.parent.high; }));
  EXPECT_TRUE(refused([](BlockRecord& other) { ++other.id.tokens[5]; }));
  EXPECT_TRUE(refused([](BlockRecord& other) { other.id.tokens.pop_back(); }));
  EXPECT_TRUE(refused([](BlockRecord& other) { other.id.tenant = "ann"; }));
  EXPECT_TRUE(refused([](BlockRecord& other) { other.length -= Bytes(1); }));
  EXPECT_TRUE(refused([](BlockRecord& other) { ++other.checksum; }));
  // What a back-end may change by itself.
  EXPECT_FALSE(refused([](BlockRecord& other) { other.expiry -= absl::Seconds(1); }));
}

TEST(TenantCipher, OpensRecordsThatItSealed) {
  const TenantCipher cipher(Key(1));
  for (const size_t tokens : {size_t{0}, size_t{1}, size_t{16}, TenantCipher::kMaxTokens}) {
    const BlockRecord record = Record(5000, tokens);
    const BlockRecord sealed = cipher.SealRecord(record);
    EXPECT_LE(sealed.id.tokens.size(), kMaxBlockTokens);
    EXPECT_EQ(sealed.expiry, record.expiry);
    const absl::StatusOr<BlockRecord> opened = cipher.OpenRecord(sealed);
    ASSERT_EQ(opened.status(), absl::OkStatus());
    EXPECT_EQ(*opened, record);
  }
}

TEST(TenantCipher, SealsARecordTheSameWayEachTimeAndAnotherOneDifferently) {
  const BlockRecord record = Record(5000);
  const BlockRecord sealed = TenantCipher(Key(1)).SealRecord(record);
  BlockRecord later = record;
  later.expiry += absl::Hours(1);
  EXPECT_EQ(TenantCipher(Key(1)).SealRecord(later).id, sealed.id);
  BlockRecord other = record;
  ++other.checksum;
  EXPECT_EQ(TenantCipher(Key(1)).SealRecord(other).id.key, sealed.id.key);
  EXPECT_NE(TenantCipher(Key(1)).SealRecord(other).id.tokens, sealed.id.tokens);
  EXPECT_NE(TenantCipher(Key(2)).SealRecord(record).id.key, sealed.id.key);
}

TEST(TenantCipher, RefusesRecordsOfWhichOneByteWasChanged) {
  const TenantCipher cipher(Key(1));
  BlockRecord sealed = cipher.SealRecord(Record(5000));
  const auto refused = [&] { return absl::IsDataLoss(cipher.OpenRecord(sealed).status()); };
  const auto each_byte = [&](void* of, size_t size) {
    for (size_t i = 0; i < size; ++i) {
      auto& byte = static_cast<uint8_t*>(of)[i];
      byte ^= 0x04;
      EXPECT_TRUE(refused()) << i;
      byte ^= 0x04;
    }
  };
  each_byte(sealed.id.tokens.data(), sealed.id.tokens.size() * sizeof(TokenId));
  each_byte(&sealed.id.key, sizeof sealed.id.key);
  each_byte(&sealed.length, sizeof sealed.length);
  each_byte(sealed.id.tenant.data(), sealed.id.tenant.size());
  EXPECT_FALSE(refused());
  sealed.id.tokens.pop_back();
  EXPECT_TRUE(refused());
}

TEST(TenantCipher, RefusesWhatIsNoSealedRecord) {
  const TenantCipher cipher(Key(1));
  std::mt19937_64 random(1);
  BlockRecord sealed = cipher.SealRecord(Record(5000));
  for (size_t size = 0; size < 60; ++size) {
    sealed.id.tokens.resize(size);
    for (TokenId& token : sealed.id.tokens) token = static_cast<TokenId>(random());
    EXPECT_TRUE(absl::IsDataLoss(cipher.OpenRecord(sealed).status()));
  }
  EXPECT_TRUE(absl::IsDataLoss(cipher.OpenRecord(Record(5000)).status()));
}

TEST(TenantCipher, OpensNothingOfAnotherKey) {
  const TenantCipher cipher(Key(1)), other(Key(2));
  const BlockRecord record = Record(5000);
  EXPECT_TRUE(absl::IsDataLoss(other.OpenRecord(cipher.SealRecord(record)).status()));
  EXPECT_TRUE(Open(other, record, Seal(cipher, record, Content(5000))).empty());
}

TEST(TenantCipher, NeverSealsTheSameBytesTheSameWay) {
  const TenantCipher cipher(Key(1));
  const BlockRecord record = Record(100);
  std::set<std::vector<std::byte>> seen;
  for (int i = 0; i < 1000; ++i) seen.insert(Seal(cipher, record, Content(100)));
  EXPECT_EQ(seen.size(), 1000);
}

}  // namespace
}  // namespace palimpsest
