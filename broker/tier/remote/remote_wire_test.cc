#include "broker/tier/remote/remote_wire.h"

#include <random>
#include <string>

#include "gtest/gtest.h"

namespace palimpsest {
namespace {

RemoteRequest Request() {
  return {.kind = RemoteRequest::Kind::kRemove,
          .id = 1,
          .place = 2,
          .key = {4, 5},
          .length = Bytes(6),
          .checksum = 7,
          .tenant = "anna"};
}

RemoteReply Reply() {
  return {.id = 1,
          .code = absl::StatusCode::kDataLoss,
          .text = "why",
          .place = 2,
          .length = Bytes(5),
          .checksum = 6};
}

TEST(RemoteWire, DecodesWhatItEncoded) {
  EXPECT_EQ(DecodeRequest(EncodeRequest(Request())).value(), Request());
  EXPECT_EQ(DecodeRequest(EncodeRequest({})).value(), RemoteRequest());
  EXPECT_EQ(DecodeReply(EncodeReply(Reply())).value(), Reply());
  EXPECT_EQ(DecodeReply(EncodeReply({})).value(), RemoteReply());
  RemoteReply wordy = Reply();
  wordy.text = std::string(1000, 'x');
  EXPECT_EQ(DecodeReply(EncodeReply(wordy))->text, std::string(kMaxReplyText, 'x'));
}

TEST(RemoteWire, RefusesWhatIsTooShortTooLongOrSomethingElse) {
  const std::string request = EncodeRequest(Request()), reply = EncodeReply(Reply());
  for (size_t size = 0; size < request.size(); ++size) {
    EXPECT_FALSE(DecodeRequest(absl::string_view(request).substr(0, size)).ok()) << size;
  }
  for (size_t size = 0; size < reply.size(); ++size) {
    EXPECT_FALSE(DecodeReply(absl::string_view(reply).substr(0, size)).ok()) << size;
  }
  EXPECT_FALSE(DecodeRequest(request + "x").ok());
  EXPECT_FALSE(DecodeReply(reply + "x").ok());
  EXPECT_FALSE(DecodeRequest(reply).ok());
  EXPECT_FALSE(DecodeReply(request).ok());
  for (const uint32_t kind : {0, 5}) {
    RemoteRequest other = Request();
    other.kind = static_cast<RemoteRequest::Kind>(kind);
    EXPECT_FALSE(DecodeRequest(EncodeRequest(other)).ok()) << kind;
  }
  RemoteRequest negative = Request();
  negative.length = Bytes(-1);
  EXPECT_FALSE(DecodeRequest(EncodeRequest(negative)).ok());
}

TEST(RemoteWire, SurvivesChangedBytes) {
  std::mt19937_64 random(1);
  for (int i = 0; i < 20000; ++i) {
    std::string request = EncodeRequest(Request()), reply = EncodeReply(Reply());
    for (int changes = 0; changes < 3; ++changes) {
      request[random() % request.size()] = static_cast<char>(random());
      reply[random() % reply.size()] = static_cast<char>(random());
    }
    if (const auto decoded = DecodeRequest(request); decoded.ok()) {
      EXPECT_EQ(EncodeRequest(*decoded), request);
    }
    if (const auto decoded = DecodeReply(reply); decoded.ok()) {
      EXPECT_EQ(EncodeReply(*decoded), reply);
    }
  }
}

}  // namespace
}  // namespace palimpsest
