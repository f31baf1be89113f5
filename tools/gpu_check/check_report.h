// What a check of tools/gpu-check says: one JSON object a line on standard output,
//   {"check": "slabs.create", "ok": true, "value": 85.2, "unit": "us", "limit": 200, "note": "..."}
// and an exit status that is 0 if all were ok. A check without a limit only informs.
#ifndef PALIMPSEST_TOOLS_GPU_CHECK_CHECK_REPORT_H_
#define PALIMPSEST_TOOLS_GPU_CHECK_CHECK_REPORT_H_

#include <cstdio>
#include <cstdlib>
#include <optional>
#include <string>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "nlohmann/json.hpp"

namespace palimpsest {

class CheckReport {
 public:
  enum class Limit { kAtMost, kAtLeast };

  void Inform(absl::string_view name, double value, absl::string_view unit,
              absl::string_view note = "") {
    Say(name, true, value, unit, std::nullopt, note);
  }
  void Measure(absl::string_view name, double value, absl::string_view unit, Limit kind,
               double limit, absl::string_view note = "") {
    const bool ok = kind == Limit::kAtMost ? value <= limit : value >= limit;
    Say(name, ok, value, unit, limit, note);
  }
  // The value, and as NAME.ratio what it is of `whole`, which must be at least `least`.
  void Ratio(absl::string_view name, double value, absl::string_view unit, double whole,
             double least, absl::string_view note = "") {
    Inform(name, value, unit, note);
    Measure(absl::StrCat(name, ".ratio"), value / whole, "", Limit::kAtLeast, least);
  }
  void Verify(absl::string_view name, bool ok, absl::string_view note = "") {
    Say(name, ok, std::nullopt, "", std::nullopt, note);
  }
  // False, and said, if the status is an error.
  bool Expect(absl::string_view name, const absl::Status& status) {
    if (!status.ok()) Verify(name, false, status.ToString());
    return status.ok();
  }

  int exit_status() const { return failed_ ? EXIT_FAILURE : EXIT_SUCCESS; }

 private:
  void Say(absl::string_view name, bool ok, std::optional<double> value, absl::string_view unit,
           std::optional<double> limit, absl::string_view note) {
    nlohmann::json line = {{"check", std::string(name)}, {"ok", ok}};
    if (value.has_value()) line["value"] = *value;
    if (!unit.empty()) line["unit"] = std::string(unit);
    if (limit.has_value()) line["limit"] = *limit;
    if (!note.empty()) line["note"] = std::string(note);
    std::puts(line.dump().c_str());
    std::fflush(stdout);
    failed_ = failed_ || !ok;
  }

  bool failed_ = false;
};

}  // namespace palimpsest

#endif  // PALIMPSEST_TOOLS_GPU_CHECK_CHECK_REPORT_H_
