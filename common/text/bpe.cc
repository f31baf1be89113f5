#include "common/text/bpe.h"

#include <algorithm>

#include "absl/strings/str_cat.h"

namespace palimpsest {
namespace {

constexpr TokenId kGone = -1;

// Orders a heap so that the smallest rank, then the leftmost, is on top.
constexpr auto kLater = [](const auto& a, const auto& b) {
  return a.rank != b.rank ? a.rank > b.rank : a.left > b.left;
};

}  // namespace

absl::StatusOr<Bpe> Bpe::Create(const std::vector<std::pair<std::string, TokenId>>& tokens,
                                const std::vector<std::pair<TokenId, TokenId>>& merges,
                                const Options& options) {
  Bpe bpe;
  bpe.options_ = options;
  bpe.byte_tokens_.fill(kGone);
  absl::flat_hash_map<absl::string_view, TokenId> ids;
  absl::flat_hash_map<TokenId, absl::string_view> texts;
  for (const auto& [bytes, id] : tokens) {
    ids.emplace(bytes, id);
    texts.emplace(id, bytes);
    if (bytes.size() == 1) bpe.byte_tokens_[static_cast<uint8_t>(bytes[0])] = id;
  }
  for (uint32_t rank = 0; rank < merges.size(); ++rank) {
    const auto& [left, right] = merges[rank];
    const auto merged = ids.find(absl::StrCat(texts[left], texts[right]));
    if (merged == ids.end()) {
      return absl::InvalidArgumentError(
          absl::StrCat("merge ", rank, " joins tokens ", left, " and ", right,
                       ", but the vocabulary has no token for the result"));
    }
    bpe.merges_[Key(left, right)] = {rank, merged->second};
  }
  Scratch scratch;
  std::vector<TokenId> encoded;
  for (const auto& [bytes, id] : tokens) {
    encoded.clear();
    if (!options.ignore_merges) bpe.MergeWord(bytes, scratch, encoded);
    if (options.ignore_merges || (encoded.size() == 1 && encoded[0] == id)) {
      bpe.whole_words_.emplace(bytes, id);
    }
  }
  return bpe;
}

void Bpe::Encode(absl::string_view word, Scratch& scratch, std::vector<TokenId>& out) const {
  const auto whole = whole_words_.find(word);
  if (whole != whole_words_.end()) {
    out.push_back(whole->second);
  } else {
    MergeWord(word, scratch, out);
  }
}

void Bpe::Split(absl::string_view word, Scratch& scratch) const {
  auto& symbols = scratch.symbols;
  symbols.clear();
  bool after_unknown = false;
  for (const char byte : word) {
    TokenId id = byte_tokens_[static_cast<uint8_t>(byte)];
    const bool unknown = id == kGone;
    if (unknown) {
      if (!options_.unknown || (after_unknown && options_.fuse_unknown)) continue;
      id = *options_.unknown;
    }
    after_unknown = unknown;
    const int32_t index = symbols.size();
    symbols.push_back({id, index - 1, index + 1});
  }
  if (!symbols.empty()) symbols.back().next = -1;
}

void Bpe::Consider(Scratch& scratch, int32_t left) const {
  const Scratch::Symbol& symbol = scratch.symbols[left];
  if (symbol.next < 0) return;
  const auto merge = merges_.find(Key(symbol.id, scratch.symbols[symbol.next].id));
  if (merge == merges_.end()) return;
  scratch.heap.push_back({merge->second.rank, static_cast<uint32_t>(left), merge->second.merged});
}

void Bpe::MergeWord(absl::string_view word, Scratch& scratch, std::vector<TokenId>& out) const {
  Split(word, scratch);
  auto& symbols = scratch.symbols;
  auto& heap = scratch.heap;
  heap.clear();
  for (int32_t i = 0; i < static_cast<int32_t>(symbols.size()); ++i) Consider(scratch, i);
  std::make_heap(heap.begin(), heap.end(), kLater);
  while (!heap.empty()) {
    std::pop_heap(heap.begin(), heap.end(), kLater);
    const Scratch::Candidate best = heap.back();
    heap.pop_back();
    Scratch::Symbol& left = symbols[best.left];
    if (left.id == kGone || left.next < 0) continue;
    Scratch::Symbol& right = symbols[left.next];
    // The pair may have changed since it was noted down.
    const auto merge = merges_.find(Key(left.id, right.id));
    if (merge == merges_.end() || merge->second.rank != best.rank) continue;
    left.id = best.merged;
    right.id = kGone;
    left.next = right.next;
    if (left.next >= 0) symbols[left.next].previous = best.left;
    const auto consider = [&](int32_t index) {
      const size_t before = heap.size();
      Consider(scratch, index);
      if (heap.size() > before) std::push_heap(heap.begin(), heap.end(), kLater);
    };
    if (left.previous >= 0) consider(left.previous);
    consider(best.left);
  }
  for (int32_t i = symbols.empty() ? -1 : 0; i >= 0; i = symbols[i].next) {
    out.push_back(symbols[i].id);
  }
}

}  // namespace palimpsest
