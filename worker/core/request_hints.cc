#include "worker/core/request_hints.h"

#include <algorithm>
#include <array>

namespace palimpsest {

std::vector<BlockType> BlockTypes(absl::Span<const PromptPart> parts, int32_t block_tokens,
                                  size_t blocks) {
  std::vector<BlockType> types;
  size_t part = 0;
  int32_t left = parts.empty() ? 0 : parts[0].tokens;  // of that part
  while (types.size() < blocks && part < parts.size()) {
    std::array<int32_t, 5> tokens = {};  // by type
    BlockType type = BlockType::kUnknown;
    for (int32_t room = block_tokens; room > 0 && part < parts.size();) {
      const int32_t taken = std::min(room, left);
      const BlockType here = parts[part].type;
      int32_t& count = tokens[static_cast<size_t>(here)];
      count += taken;
      if (count > tokens[static_cast<size_t>(type)]) type = here;
      room -= taken;
      left -= taken;
      if (left == 0 && ++part < parts.size()) left = parts[part].tokens;
    }
    types.push_back(type);
  }
  return types;
}

}  // namespace palimpsest
