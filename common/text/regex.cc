#include "common/text/regex.h"

#include <cstdint>
#include <string>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"

#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>

namespace palimpsest {
namespace {

constexpr uint32_t kMatchLimit = 10'000'000;
constexpr uint32_t kDepthLimit = 100'000;
constexpr uint32_t kHeapLimitKiB = 64 * 1024;
constexpr size_t kMaxPatternBytes = 64 * 1024;

pcre2_code* Code(const std::shared_ptr<void>& code) { return static_cast<pcre2_code*>(code.get()); }

// Writes `\s` and `\S` as properties.
std::string WithUnicodeSpace(absl::string_view pattern) {
  std::string result;
  for (size_t i = 0; i < pattern.size(); ++i) {
    if (pattern[i] != '\\' || i + 1 == pattern.size()) {
      result.push_back(pattern[i]);
      continue;
    }
    const char escaped = pattern[++i];
    if (escaped == 's') {
      result += "\\p{White_Space}";
    } else if (escaped == 'S') {
      result += "\\P{White_Space}";
    } else {
      result.push_back('\\');
      result.push_back(escaped);
    }
  }
  return result;
}

std::string ErrorText(int code) {
  PCRE2_UCHAR text[256];
  if (pcre2_get_error_message(code, text, sizeof(text)) < 0) return absl::StrCat("error ", code);
  return reinterpret_cast<const char*>(text);
}

// Length in bytes of the character that starts at `pos`.
size_t CharacterLength(absl::string_view text, size_t pos) {
  size_t end = pos + 1;
  while (end < text.size() && (static_cast<uint8_t>(text[end]) & 0xC0) == 0x80) ++end;
  return end - pos;
}

}  // namespace

Regex::Regex(void* code)
    : code_(static_cast<pcre2_code*>(code), pcre2_code_free),
      limits_(pcre2_match_context_create(nullptr), pcre2_match_context_free) {
  auto* limits = static_cast<pcre2_match_context*>(limits_.get());
  pcre2_set_match_limit(limits, kMatchLimit);
  pcre2_set_depth_limit(limits, kDepthLimit);
  pcre2_set_heap_limit(limits, kHeapLimitKiB);
}

absl::StatusOr<Regex> Regex::Compile(absl::string_view pattern) {
  if (pattern.size() > kMaxPatternBytes) {
    return absl::InvalidArgumentError(absl::StrCat(
        "pattern has ", pattern.size(), " bytes, at most ", kMaxPatternBytes, " are allowed"));
  }
  const std::string text = WithUnicodeSpace(pattern);
  int error = 0;
  PCRE2_SIZE offset = 0;
  pcre2_code* code =
      pcre2_compile(reinterpret_cast<PCRE2_SPTR>(text.data()), text.size(),
                    PCRE2_UTF | PCRE2_UCP | PCRE2_NEVER_BACKSLASH_C, &error, &offset, nullptr);
  if (code == nullptr) {
    return absl::InvalidArgumentError(
        absl::StrCat("pattern \"", text, "\" is wrong at byte ", offset, ": ", ErrorText(error)));
  }
  pcre2_jit_compile(code, PCRE2_JIT_COMPLETE);  // Without it the interpreter does the same, slower.
  return Regex(code);
}

std::string Regex::Quote(absl::string_view text) {
  return absl::StrCat("\\Q", absl::StrReplaceAll(text, {{"\\E", "\\E\\\\E\\Q"}}), "\\E");
}

Regex::Scratch::Scratch(const Regex& regex)
    : match_data_(pcre2_match_data_create_from_pattern(Code(regex.code_), nullptr)) {}

void Regex::Scratch::Free::operator()(void* match_data) const {
  pcre2_match_data_free(static_cast<pcre2_match_data*>(match_data));
}

absl::StatusOr<std::optional<Regex::Span>> Regex::Find(absl::string_view text, size_t from,
                                                       Scratch& scratch) const {
  auto* limits = static_cast<pcre2_match_context*>(limits_.get());
  auto* data = static_cast<pcre2_match_data*>(scratch.match_data_.get());
  while (from < text.size()) {
    const auto search = [&](uint32_t options) {
      return pcre2_match(Code(code_), reinterpret_cast<PCRE2_SPTR>(text.data()), text.size(), from,
                         options | PCRE2_NO_UTF_CHECK, data, limits);
    };
    int result = search(0);
    if (result == PCRE2_ERROR_JIT_STACKLIMIT) result = search(PCRE2_NO_JIT);
    if (result == PCRE2_ERROR_NOMATCH) return std::nullopt;
    if (result < 0) {
      return absl::ResourceExhaustedError(
          absl::StrCat("splitting ", text.size(), " bytes of text failed: ", ErrorText(result)));
    }
    const PCRE2_SIZE* span = pcre2_get_ovector_pointer(data);
    if (span[1] > span[0]) return Span{span[0], span[1]};
    from = span[0] + CharacterLength(text, span[0]);
  }
  return std::nullopt;
}

}  // namespace palimpsest
