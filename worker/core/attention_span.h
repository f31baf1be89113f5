// What tokens of a sequence see before them: what attention costs grows with it.
#ifndef PALIMPSEST_WORKER_CORE_ATTENTION_SPAN_H_
#define PALIMPSEST_WORKER_CORE_ATTENTION_SPAN_H_

#include <algorithm>
#include <cstdint>

namespace palimpsest {

// Sum over tokens first .. first + count - 1 of how many earlier ones each sees. `window`: tokens
// that a token sees, itself included; 0 for all.
inline double TokensSeen(int32_t first, int32_t count, int32_t window) {
  const auto of_all = [](double from, double n) { return n * (from + (n - 1) / 2); };
  if (window == 0) return of_all(first, count);
  const int32_t growing = std::clamp(window - 1 - first, 0, count);
  return of_all(first, growing) + static_cast<double>(count - growing) * (window - 1);
}

}  // namespace palimpsest

#endif  // PALIMPSEST_WORKER_CORE_ATTENTION_SPAN_H_
