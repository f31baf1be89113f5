// How the numbers of a KV cache are stored, and what that takes. Pure.
#ifndef PALIMPSEST_COMMON_KV_FORMAT_H_
#define PALIMPSEST_COMMON_KV_FORMAT_H_

#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "common/bytes.h"

namespace palimpsest {

// A row is what is stored, and scaled, as one vector: the key or the value of a head, or a latent
// vector. Scales that are the same for all tokens lie outside the cache and take nothing here.
struct KvFormat {
  int32_t bits = 16;        // of a number
  int32_t scale_bytes = 0;  // of a scale in the cache together with its zero point; 0: none there
  int32_t scale_group = 0;  // numbers of a row that share a scale; 0: all of them

  Bytes RowBytes(int64_t numbers) const;
};

// bf16, f16, f32    no scales
// fp8_e4m3, _e5m2   fixed scales
// int8              a float for each row
// int4              a half for each row, and its zero point, another half
// nvfp4             4 bits, and a scale of one byte for each 16 numbers
// InvalidArgument for any other name lists these.
absl::StatusOr<KvFormat> FindKvFormat(absl::string_view name);

// In the order in which they are listed to users.
std::vector<absl::string_view> KvFormatNames();

}  // namespace palimpsest

#endif  // PALIMPSEST_COMMON_KV_FORMAT_H_
