#include "common/text/normalizer.h"

#include <utf8proc.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <memory>

#include "absl/strings/str_cat.h"
#include "common/text/json_fields.h"
#include "nlohmann/json.hpp"

namespace palimpsest {
namespace {

// Lead byte of U+0300, the first character that can change under NFC or be a part of a composition.
constexpr uint8_t kFirstCombiningLead = 0xCC;

}  // namespace

absl::StatusOr<Normalizer> NormalizerFromJson(const nlohmann::json* json) {
  if (json == nullptr) return Normalizer::kNone;
  const auto type = RequireString(*json, "type", "normalizer");
  if (!type.ok()) return type.status();
  if (*type == "NFC") return Normalizer::kNfc;
  if (*type != "Sequence") {
    return absl::UnimplementedError(
        absl::StrCat("normalizer of type \"", *type, "\" is not supported (NFC is)"));
  }
  const auto members = RequireMember(*json, "normalizers", "normalizer Sequence");
  if (!members.ok()) return members.status();
  Normalizer result = Normalizer::kNone;
  for (const auto& member : **members) {
    const auto type = RequireString(member, "type", "a member of normalizer Sequence");
    if (!type.ok()) return type.status();
    if (*type != "NFC") {
      return absl::UnimplementedError(
          absl::StrCat("normalizer of type \"", *type, "\" is not supported (NFC is)"));
    }
    result = Normalizer::kNfc;
  }
  return result;
}

absl::StatusOr<absl::string_view> Normalize(Normalizer normalizer, absl::string_view text,
                                            std::string* storage) {
  const bool unchanged =
      normalizer == Normalizer::kNone || std::all_of(text.begin(), text.end(), [](char c) {
        return static_cast<uint8_t>(c) < kFirstCombiningLead;
      });
  if (unchanged) return text;
  utf8proc_uint8_t* mapped = nullptr;
  const utf8proc_ssize_t size =
      utf8proc_map(reinterpret_cast<const utf8proc_uint8_t*>(text.data()), text.size(), &mapped,
                   static_cast<utf8proc_option_t>(UTF8PROC_STABLE | UTF8PROC_COMPOSE));
  const std::unique_ptr<utf8proc_uint8_t, void (*)(void*)> owner(mapped, std::free);
  if (size < 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("text cannot be normalized: ", utf8proc_errmsg(size)));
  }
  storage->assign(reinterpret_cast<const char*>(mapped), size);
  return *storage;
}

}  // namespace palimpsest
