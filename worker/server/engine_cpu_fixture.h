// Requests for an engine on the CPU runner, and what comes out of them to the last bit.
#ifndef PALIMPSEST_WORKER_SERVER_ENGINE_CPU_FIXTURE_H_
#define PALIMPSEST_WORKER_SERVER_ENGINE_CPU_FIXTURE_H_

#include <cstdint>
#include <optional>
#include <random>
#include <utility>
#include <vector>

#include "gtest/gtest.h"
#include "worker/core/token_bytes.h"
#include "worker/server/engine.h"

namespace palimpsest {

class NoBytes : public TokenBytes {
 public:
  absl::string_view BytesOf(TokenId) const override { return "x"; }
};

inline std::vector<SequenceRequest> RandomRequests(std::mt19937& random, int32_t vocab_size,
                                                   int count) {
  std::vector<SequenceRequest> requests;
  for (int i = 0; i < count; ++i) {
    SequenceRequest request;
    std::mt19937 shared(random() % 2);  // two beginnings that many share
    for (int n = random() % 30; n > 0; --n) request.prompt.push_back(shared() % vocab_size);
    for (int n = 1 + random() % 20; n > 0; --n) request.prompt.push_back(random() % vocab_size);
    request.params.max_tokens = 1 + static_cast<int32_t>(random() % 40);
    request.params.temperature = random() % 2 ? 0.0f : 1.2f;
    request.params.top_p = random() % 2 ? 1.0f : 0.9f;
    request.params.repetition_penalty = random() % 2 ? 1.0f : 1.2f;
    request.params.seed = random();
    request.params.logprobs = 2;
    requests.push_back(std::move(request));
  }
  return requests;
}

struct Output {
  std::vector<SampledToken> tokens;
  std::optional<GenerationStream::End> end;

  void Take(GenerationStream& stream) {
    auto batch = stream.Take();
    for (SampledToken& token : batch.tokens) tokens.push_back(std::move(token));
    if (batch.end.has_value()) end = std::move(batch.end);
  }
};

inline Output RunAlone(Engine& engine, const SequenceRequest& request) {
  const auto stream = engine.Submit(request, [] {});
  EXPECT_TRUE(stream.ok()) << stream.status();
  Output output;
  while (stream.ok() && !output.end.has_value()) {
    engine.RunOnce();
    output.Take(**stream);
  }
  return output;
}

inline void ExpectSame(const Output& output, const Output& alone) {
  ASSERT_TRUE(output.end.has_value());
  ASSERT_TRUE(output.end->status.ok()) << output.end->status;
  ASSERT_EQ(output.tokens.size(), alone.tokens.size());
  for (size_t t = 0; t < alone.tokens.size(); ++t) {
    ASSERT_EQ(output.tokens[t].token, alone.tokens[t].token) << "token " << t;
    ASSERT_EQ(output.tokens[t].logprob, alone.tokens[t].logprob) << "token " << t;
    ASSERT_EQ(output.tokens[t].top, alone.tokens[t].top) << "token " << t;
  }
}

}  // namespace palimpsest

#endif  // PALIMPSEST_WORKER_SERVER_ENGINE_CPU_FIXTURE_H_
