// The setting that lists GPUs, which brokers and workers share.
#ifndef PALIMPSEST_COMMON_GPU_LIST_H_
#define PALIMPSEST_COMMON_GPU_LIST_H_

#include <algorithm>
#include <string>
#include <vector>

#include "absl/strings/numbers.h"
#include "common/yaml_config.h"

namespace palimpsest {

// "gpus" of this map: different numbers as in nvidia-smi -L, in the order of ranks; [0] when there
// are none. An error if there are some though memory is not that of GPUs (`cuda`).
inline std::vector<int> ReadGpus(ConfigReader& reader, bool cuda) {
  constexpr size_t kMost = 16;
  constexpr int kNumbers = 64;
  std::vector<int> gpus;
  for (const std::string& text : reader.Strings("gpus", kMost)) {
    int gpu = -1;
    if (!absl::SimpleAtoi(text, &gpu) || gpu < 0 || gpu >= kNumbers ||
        std::find(gpus.begin(), gpus.end(), gpu) != gpus.end()) {
      reader.Error("gpus", "expected different numbers of GPUs, as in nvidia-smi -L: [0, 1]");
      break;
    }
    gpus.push_back(gpu);
  }
  if (!cuda && !gpus.empty()) reader.Error("gpus", "expected only with cuda");
  if (gpus.empty()) gpus.push_back(0);
  return gpus;
}

}  // namespace palimpsest

#endif  // PALIMPSEST_COMMON_GPU_LIST_H_
