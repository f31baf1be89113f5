#include "common/kv_format.h"

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"

namespace palimpsest {
namespace {

struct NamedFormat {
  absl::string_view name;
  KvFormat format;
};

constexpr NamedFormat kFormats[] = {
    {"bf16", {}},
    {"f16", {}},
    {"f32", {.bits = 32}},
    {"fp8_e4m3", {.bits = 8}},
    {"fp8_e5m2", {.bits = 8}},
    {"int8", {.bits = 8, .scale_bytes = 4}},
    {"int4", {.bits = 4, .scale_bytes = 4}},
    {"nvfp4", {.bits = 4, .scale_bytes = 1, .scale_group = 16}},
};

constexpr int64_t CeilDiv(int64_t a, int64_t b) { return (a + b - 1) / b; }

}  // namespace

Bytes KvFormat::RowBytes(int64_t numbers) const {
  if (numbers == 0) return Bytes(0);
  const int64_t scales = scale_group == 0 ? 1 : CeilDiv(numbers, scale_group);
  return Bytes(CeilDiv(numbers * bits, 8) + scales * scale_bytes);
}

absl::StatusOr<KvFormat> FindKvFormat(absl::string_view name) {
  for (const NamedFormat& named : kFormats) {
    if (name == named.name) return named.format;
  }
  return absl::InvalidArgumentError(absl::StrCat("KV format: expected one of ",
                                                 absl::StrJoin(KvFormatNames(), ", "), ", got '",
                                                 name.substr(0, 80), "'"));
}

std::vector<absl::string_view> KvFormatNames() {
  std::vector<absl::string_view> names;
  for (const NamedFormat& named : kFormats) names.push_back(named.name);
  return names;
}

}  // namespace palimpsest
