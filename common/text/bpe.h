// Byte pair encoding: a word's bytes are merged pair by pair, the pair that stands first in the
// list of merges first, the leftmost among equal ones.
#ifndef PALIMPSEST_COMMON_TEXT_BPE_H_
#define PALIMPSEST_COMMON_TEXT_BPE_H_

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "common/ids.h"

namespace palimpsest {

// Immutable; Encode may be called from several threads with a Scratch each.
class Bpe {
 public:
  struct Options {
    // A word that is a token as a whole is that token, whatever the merges say.
    bool ignore_merges = false;
    // Stands for bytes without a token; such bytes vanish if there is none.
    std::optional<TokenId> unknown;
    // A run of such bytes is one unknown token.
    bool fuse_unknown = false;
  };

  // Memory that Encode reuses from word to word.
  class Scratch {
    friend class Bpe;
    struct Symbol {
      TokenId id;  // -1: merged into its left neighbour
      int32_t previous;
      int32_t next;
    };
    struct Candidate {
      uint32_t rank;
      uint32_t left;  // index into symbols
      TokenId merged;
    };
    std::vector<Symbol> symbols;
    std::vector<Candidate> heap;
  };

  // `tokens` are the byte strings of the vocabulary with their ids, none empty, no string twice,
  // ids not negative. `merges` are pairs of ids in order of rank. InvalidArgument if a merge's
  // result is not in the vocabulary.
  static absl::StatusOr<Bpe> Create(const std::vector<std::pair<std::string, TokenId>>& tokens,
                                    const std::vector<std::pair<TokenId, TokenId>>& merges,
                                    const Options& options);

  // Appends the tokens of `word`, at most 1 GiB, to `out`. O(n log n).
  void Encode(absl::string_view word, Scratch& scratch, std::vector<TokenId>& out) const;

 private:
  struct Merge {
    uint32_t rank;
    TokenId merged;
  };

  static uint64_t Key(TokenId left, TokenId right) {
    return uint64_t{static_cast<uint32_t>(left)} << 32 | static_cast<uint32_t>(right);
  }

  void MergeWord(absl::string_view word, Scratch& scratch, std::vector<TokenId>& out) const;
  void Consider(Scratch& scratch, int32_t left) const;
  void Split(absl::string_view word, Scratch& scratch) const;

  Options options_;
  std::array<TokenId, 256> byte_tokens_;
  absl::flat_hash_map<uint64_t, Merge> merges_;
  // Words whose encoding is one known token: most words of most texts.
  absl::flat_hash_map<std::string, TokenId> whole_words_;
};

}  // namespace palimpsest

#endif  // PALIMPSEST_COMMON_TEXT_BPE_H_
