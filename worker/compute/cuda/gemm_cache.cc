#include "worker/compute/cuda/gemm_cache.h"

#include <fstream>
#include <sstream>
#include <utility>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_split.h"
#include "common/file.h"

namespace palimpsest::cuda {
namespace {

constexpr absl::string_view kHeader = "palimpsest gemm algorithms 1";
constexpr size_t kFields = 4;

bool ParseWords(absl::string_view text, std::array<uint64_t, 8>& words) {
  const std::vector<absl::string_view> parts = absl::StrSplit(text, ' ');
  if (parts.size() != words.size()) return false;
  for (size_t i = 0; i < words.size(); ++i) {
    if (!absl::SimpleHexAtoi(parts[i], &words[i])) return false;
  }
  return true;
}

}  // namespace

const GemmChoice* GemmCache::Find(const std::string& key) const {
  const auto found = choices_.find(key);
  return found == choices_.end() ? nullptr : &found->second;
}

std::string GemmCache::Serialize() const {
  std::string text = absl::StrCat(kHeader, "\n");
  for (const auto& [key, choice] : choices_) {
    absl::StrAppend(&text, key, "\t");
    for (size_t i = 0; i < choice.algorithm.size(); ++i) {
      absl::StrAppendFormat(&text, "%s%016x", i == 0 ? "" : " ", choice.algorithm[i]);
    }
    absl::StrAppendFormat(&text, "\t%d\t%.17g\n", choice.workspace_bytes, choice.microseconds);
  }
  return text;
}

absl::StatusOr<GemmCache> GemmCache::Parse(absl::string_view text) {
  GemmCache cache;
  int number = 0;
  for (const absl::string_view line : absl::StrSplit(text, '\n')) {
    if (++number == 1) {
      if (line == kHeader) continue;
      return absl::DataLossError(
          absl::StrCat("line 1: expected '", kHeader, "', got '", line.substr(0, 80), "'"));
    }
    if (line.empty()) continue;
    const std::vector<absl::string_view> fields = absl::StrSplit(line, '\t');
    GemmChoice choice;
    if (fields.size() != kFields || !ParseWords(fields[1], choice.algorithm) ||
        !absl::SimpleAtoi(fields[2], &choice.workspace_bytes) ||
        !absl::SimpleAtod(fields[3], &choice.microseconds)) {
      return absl::DataLossError(absl::StrCat(
          "line ", number, ": expected key, algorithm, workspace and time between tabs"));
    }
    cache.Put(std::string(fields[0]), choice);
  }
  return cache;
}

absl::StatusOr<GemmCache> GemmCache::Load(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) return GemmCache();
  std::ostringstream text;
  text << file.rdbuf();
  auto cache = Parse(text.str());
  if (cache.ok()) return cache;
  return absl::DataLossError(absl::StrCat(path, ": ", cache.status().message(),
                                          "; delete it to have the algorithms measured again"));
}

absl::Status GemmCache::Store(const std::string& path) const {
  return WriteFileAtomically(path, Serialize());
}

}  // namespace palimpsest::cuda
