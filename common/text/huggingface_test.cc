// Compares with what Hugging Face tokenizers answers (testdata/make_cases.py), and with the
// reference outputs of the real model.
#include <fstream>
#include <string>

#include "common/text/detokenizer.h"
#include "common/text/tokenizer.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "nlohmann/json.hpp"

namespace palimpsest {
namespace {

using nlohmann::json;
using Ids = std::vector<TokenId>;

constexpr char kSmolLm2[] = "../cache/smollm2";

json ReadJson(const std::string& path) {
  std::ifstream file(path);
  EXPECT_TRUE(file) << path;
  return json::parse(file);
}

// Cases are many and long: the first few differences are enough.
class Differences {
 public:
  template <typename T>
  void Compare(const T& got, const T& want, const std::string& input) {
    ++compared_;
    if (got == want || ++count_ > 5) return;
    ADD_FAILURE() << "input " << input << "\n got  " << testing::PrintToString(got) << "\n want "
                  << testing::PrintToString(want);
  }
  ~Differences() { EXPECT_EQ(count_, 0) << "of " << compared_; }

 private:
  int count_ = 0;
  int compared_ = 0;
};

std::unique_ptr<Tokenizer> MakeTokenizer(const json& entry) {
  auto tokenizer = entry["tokenizer"].is_null()
                       ? Tokenizer::Load(kSmolLm2)
                       : Tokenizer::Parse(entry["tokenizer"].get<std::string>());
  EXPECT_TRUE(tokenizer.ok()) << entry["name"] << tokenizer.status();
  return tokenizer.ok() ? *std::move(tokenizer) : nullptr;
}

class HuggingFace : public testing::Test {
 protected:
  void SetUp() override {
    all_ = ReadJson("common/text/cases.json");
    ASSERT_EQ(all_.size(), 5);
  }
  json all_;
};

TEST_F(HuggingFace, EncodingIsEqual) {
  for (const json& entry : all_) {
    SCOPED_TRACE(entry["name"].get<std::string>());
    const auto tokenizer = MakeTokenizer(entry);
    ASSERT_NE(tokenizer, nullptr);
    Differences differences;
    for (const json& c : entry["encode"]) {
      const auto ids = tokenizer->Encode(c["text"].get<std::string>(),
                                         {.parse_special = c["parse_special"].get<bool>(),
                                          .add_special = c["add_special"].get<bool>()});
      ASSERT_TRUE(ids.ok()) << ids.status() << c;
      differences.Compare(*ids, c["ids"].get<Ids>(), c.dump());
    }
  }
}

TEST_F(HuggingFace, DecodingIsEqualAtOnceAndTokenByToken) {
  for (const json& entry : all_) {
    SCOPED_TRACE(entry["name"].get<std::string>());
    const auto tokenizer = MakeTokenizer(entry);
    ASSERT_NE(tokenizer, nullptr);
    Differences differences;
    for (const json& c : entry["decode"]) {
      const auto ids = c["ids"].get<Ids>();
      const auto want = c["text"].get<std::string>();
      differences.Compare(tokenizer->Decode(ids), want, c.dump());
      Detokenizer stream(tokenizer.get());
      std::string streamed;
      for (const TokenId id : ids) streamed += stream.Push(id);
      streamed += stream.Finish();
      differences.Compare(streamed, want, c.dump());
    }
  }
}

TEST(SmolLm2, ReferenceOutputsAreReproduced) {
  const auto tokenizer = Tokenizer::Load(kSmolLm2);
  ASSERT_TRUE(tokenizer.ok()) << tokenizer.status();
  const json reference = ReadJson("tests/data/smollm2/reference.json");
  Differences differences;
  for (const json& c : reference["tokenizer"]) {
    const auto ids = (*tokenizer)->Encode(c["text"].get<std::string>());
    ASSERT_TRUE(ids.ok()) << ids.status();
    differences.Compare(*ids, c["ids"].get<Ids>(), c.dump());
  }
  for (const json& c : reference["cases"]) {
    const auto ids = (*tokenizer)->Encode(c["prompt"].get<std::string>());
    ASSERT_TRUE(ids.ok()) << ids.status();
    differences.Compare(*ids, c["prompt_ids"].get<Ids>(), c["prompt"]);
    differences.Compare((*tokenizer)->Decode(c["greedy_ids"]), c["text"].get<std::string>(),
                        c["prompt"]);
  }
  EXPECT_EQ((*tokenizer)->vocab_size(), 49152);
  EXPECT_EQ((*tokenizer)->Find("<|im_end|>"), 2);
  EXPECT_TRUE((*tokenizer)->IsSpecial(2));
}

}  // namespace
}  // namespace palimpsest
