// config.json: whatever it says, a shape that is accepted can be sized without overflow, and the
// sizing's inverses are exact.
#include <cstddef>
#include <cstdint>
#include <cstdlib>

#include "absl/strings/string_view.h"
#include "broker/core/sizing/kv_sizing.h"
#include "broker/core/sizing/model_shape.h"

namespace {

using palimpsest::Bytes;
using palimpsest::KvSizing;

void Check(bool condition) {
  if (!condition) std::abort();
}

void CheckSizing(const absl::StatusOr<std::vector<palimpsest::KvGroup>>& groups) {
  if (!groups.ok()) return;
  const auto sizing = KvSizing::Create(*groups, 16);
  if (!sizing.ok()) return;
  for (const int64_t tokens : {int64_t{1}, int64_t{4097}, KvSizing::kMaxTokens}) {
    const Bytes bytes = sizing->BytesFor(tokens);
    Check(bytes > Bytes(0) && sizing->MaxBatch(tokens, bytes) == 1);
    Check(sizing->MaxTokens(bytes) >= tokens);
    Check(sizing->MaxTokens(bytes - Bytes(1)) < tokens);
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const absl::string_view text(reinterpret_cast<const char*>(data), size);
  const auto shape = palimpsest::ParseModelShape(text);
  if (!shape.ok()) return 0;
  for (const int32_t ranks : {1, 2, 8, 64}) {
    const palimpsest::ShardOptions options = {.format = *palimpsest::FindKvFormat("nvfp4"),
                                              .ranks = ranks};
    CheckSizing(palimpsest::KvGroups(*shape, options));
    CheckSizing(palimpsest::MultiHeadGroups(*shape, options));
  }
  return 0;
}
