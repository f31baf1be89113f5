#include "common/text/utf8.h"

#include <cstring>

#include "absl/strings/str_cat.h"

namespace palimpsest {
namespace {

constexpr absl::string_view kReplacement = "\xEF\xBF\xBD";

// What may follow a lead byte: how many bytes, and the range of the first of them.
struct Lead {
  uint8_t continuations;
  uint8_t low;
  uint8_t high;
};

Lead LeadOf(uint8_t byte) {
  if (byte >= 0xC2 && byte <= 0xDF) return {1, 0x80, 0xBF};
  if (byte == 0xE0) return {2, 0xA0, 0xBF};
  if (byte == 0xED) return {2, 0x80, 0x9F};
  if (byte >= 0xE1 && byte <= 0xEF) return {2, 0x80, 0xBF};
  if (byte == 0xF0) return {3, 0x90, 0xBF};
  if (byte >= 0xF1 && byte <= 0xF3) return {3, 0x80, 0xBF};
  if (byte == 0xF4) return {3, 0x80, 0x8F};
  return {0, 0, 0};
}

// Length of the run of ASCII at the start of `text`.
size_t AsciiPrefix(absl::string_view text) {
  size_t i = 0;
  for (uint64_t word; i + sizeof(word) <= text.size(); i += sizeof(word)) {
    std::memcpy(&word, text.data() + i, sizeof(word));
    if (word & 0x8080808080808080u) break;
  }
  while (i < text.size() && static_cast<uint8_t>(text[i]) < 0x80) ++i;
  return i;
}

}  // namespace

Utf8Step NextUtf8(absl::string_view text) {
  const uint8_t first = text[0];
  if (first < 0x80) return {Utf8Step::Kind::kCharacter, 1, first};
  const Lead lead = LeadOf(first);
  if (lead.continuations == 0) return {Utf8Step::Kind::kInvalid, 1};
  char32_t code_point = first & (0x3F >> lead.continuations);
  uint8_t low = lead.low, high = lead.high;
  for (size_t i = 1; i <= lead.continuations; ++i) {
    if (i == text.size()) return {Utf8Step::Kind::kIncomplete, i};
    const uint8_t byte = text[i];
    if (byte < low || byte > high) return {Utf8Step::Kind::kInvalid, i};
    code_point = code_point << 6 | (byte & 0x3F);
    low = 0x80, high = 0xBF;
  }
  return {Utf8Step::Kind::kCharacter, size_t{lead.continuations} + 1, code_point};
}

size_t ValidUtf8Prefix(absl::string_view text) {
  size_t pos = 0;
  while (true) {
    pos += AsciiPrefix(text.substr(pos));
    if (pos == text.size()) return pos;
    const Utf8Step step = NextUtf8(text.substr(pos));
    if (step.kind != Utf8Step::Kind::kCharacter) return pos;
    pos += step.length;
  }
}

absl::Status CheckUtf8(absl::string_view text, absl::string_view what) {
  const size_t valid = ValidUtf8Prefix(text);
  if (valid == text.size()) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat(what, " must be UTF-8, but byte ", valid, " (0x",
                   absl::Hex(static_cast<uint8_t>(text[valid]), absl::kZeroPad2),
                   ") does not begin a well-formed character"));
}

void AppendUtf8(char32_t code_point, std::string* out) {
  if (code_point < 0x80) {
    out->push_back(code_point);
  } else if (code_point < 0x800) {
    out->push_back(0xC0 | code_point >> 6);
    out->push_back(0x80 | (code_point & 0x3F));
  } else if (code_point < 0x10000) {
    out->push_back(0xE0 | code_point >> 12);
    out->push_back(0x80 | (code_point >> 6 & 0x3F));
    out->push_back(0x80 | (code_point & 0x3F));
  } else {
    out->push_back(0xF0 | code_point >> 18);
    out->push_back(0x80 | (code_point >> 12 & 0x3F));
    out->push_back(0x80 | (code_point >> 6 & 0x3F));
    out->push_back(0x80 | (code_point & 0x3F));
  }
}

void Utf8Repair::Push(absl::string_view bytes, std::string* out) {
  std::string joined;
  if (!held_.empty()) {
    joined = std::move(held_);
    held_.clear();
    joined.append(bytes.data(), bytes.size());
    bytes = joined;
  }
  while (!bytes.empty()) {
    const size_t valid = ValidUtf8Prefix(bytes);
    out->append(bytes.data(), valid);
    bytes.remove_prefix(valid);
    if (bytes.empty()) break;
    const Utf8Step step = NextUtf8(bytes);
    if (step.kind == Utf8Step::Kind::kIncomplete) {
      held_ = std::string(bytes);
      break;
    }
    out->append(kReplacement.data(), kReplacement.size());
    bytes.remove_prefix(step.length);
  }
}

void Utf8Repair::Finish(std::string* out) {
  if (!held_.empty()) out->append(kReplacement.data(), kReplacement.size());
  held_.clear();
}

}  // namespace palimpsest
