// What a sequence of the fake model says alone, with plenty of memory: what a scheduler has to give
// whatever happens to its memory.
#ifndef PALIMPSEST_WORKER_CORE_SCHEDULER_ORACLE_H_
#define PALIMPSEST_WORKER_CORE_SCHEDULER_ORACLE_H_

#include <cstdint>
#include <string>
#include <vector>

#include "common/ids.h"
#include "worker/core/fake_model.h"
#include "worker/core/sequence.h"
#include "worker/core/token_bytes.h"

namespace palimpsest {

inline constexpr TokenId kOracleEos = 7;

// Texts of up to four letters of three, so that stop strings often match, across tokens too.
class LetterTokens : public TokenBytes {
 public:
  LetterTokens() {
    for (int i = 0; i < 64; ++i) {
      std::string text;
      for (int value = i; value > 0; value /= 3) text += static_cast<char>('a' + value % 3);
      texts_.push_back(text);
    }
  }
  absl::string_view BytesOf(TokenId token) const override { return texts_.at(token); }

 private:
  std::vector<std::string> texts_;
};

struct ExpectedOutput {
  std::vector<TokenId> tokens;
  FinishReason reason = FinishReason::kLength;
  int32_t trim = 0;
};

// `longest`: tokens of the longest sequence. Aborts if the output has no end.
ExpectedOutput OutputAlone(const FakeModel::Config& model, const TokenBytes& bytes,
                           const SequenceRequest& request, int32_t longest);

}  // namespace palimpsest

#endif  // PALIMPSEST_WORKER_CORE_SCHEDULER_ORACLE_H_
