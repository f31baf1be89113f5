#include "common/bytes.h"

#include <cmath>
#include <cstdlib>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/types/span.h"

namespace palimpsest {
namespace {

struct Unit {
  absl::string_view name;
  int64_t size;
};
constexpr Unit kBinaryUnits[] = {
    {"TiB", int64_t{1} << 40}, {"GiB", 1 << 30}, {"MiB", 1 << 20}, {"KiB", 1 << 10}};
constexpr Unit kOtherUnits[] = {
    {"TB", 1'000'000'000'000}, {"GB", 1'000'000'000}, {"MB", 1'000'000}, {"KB", 1'000}, {"B", 1}};

// Strips a unit off the end of `number`; the bytes that it stands for, 1 if there is none.
int64_t TakeUnit(absl::string_view& number) {
  for (absl::Span<const Unit> units :
       {absl::MakeConstSpan(kBinaryUnits), absl::MakeConstSpan(kOtherUnits)}) {
    for (const Unit& unit : units) {
      if (!absl::EndsWithIgnoreCase(number, unit.name)) continue;
      number.remove_suffix(unit.name.size());
      number = absl::StripTrailingAsciiWhitespace(number);
      return unit.size;
    }
  }
  return 1;
}

}  // namespace

std::string Bytes::ToString() const {
  for (const auto& [unit, size] : kBinaryUnits) {
    if (std::llabs(count_) < size) continue;
    if (count_ % size == 0) return absl::StrCat(count_ / size, " ", unit);
    return absl::StrFormat("%.1f %s", static_cast<double>(count_) / static_cast<double>(size),
                           unit);
  }
  return absl::StrCat(count_, " B");
}

absl::StatusOr<Bytes> ParseBytes(absl::string_view text) {
  absl::string_view number = absl::StripAsciiWhitespace(text);
  const int64_t scale = TakeUnit(number);
  double value = 0;
  const bool is_number = absl::SimpleAtod(number, &value) && std::isfinite(value);
  const double count = value * static_cast<double>(scale);
  if (!is_number || value < 0 || count > 9.0e18 || count != std::floor(count)) {
    return absl::InvalidArgumentError(absl::StrCat(
        "'", text,
        "' is not a size: expected a whole number of bytes such as 4096, 64 KiB or 1.5GiB"));
  }
  return Bytes(static_cast<int64_t>(count));
}

}  // namespace palimpsest
