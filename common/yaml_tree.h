// The tree of a YAML document, for yaml_config.h alone, whose comment states the accepted syntax.
#ifndef PALIMPSEST_COMMON_YAML_TREE_H_
#define PALIMPSEST_COMMON_YAML_TREE_H_

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "common/bytes.h"

namespace palimpsest::yaml_config_internal {

inline constexpr Bytes kMaxYamlFile = MiB(1);

struct Node {
  enum class Kind { kNull, kScalar, kList, kMap };
  Kind kind = Kind::kNull;
  int line = 1;
  std::string text;
  bool quoted = false;
  std::vector<std::unique_ptr<Node>> items;
  std::vector<std::pair<std::string, std::unique_ptr<Node>>> entries;
  // A setting that was asked for; Finish reports the others.
  mutable bool read = false;

  const Node* Entry(absl::string_view key) const {
    for (const auto& [name, node] : entries) {
      if (name == key) return node.get();
    }
    return nullptr;
  }
};

// The root, a map (an empty one for an empty document). InvalidArgument, with `file_name` and a
// line, for text that is too long, too deep, has too many values or uses what is not accepted.
absl::StatusOr<std::unique_ptr<Node>> ParseYamlTree(absl::string_view text,
                                                    absl::string_view file_name);

// "a map", "nothing", "'12 GiBB'": what errors say was found.
std::string KindName(const Node& node);

}  // namespace palimpsest::yaml_config_internal

#endif  // PALIMPSEST_COMMON_YAML_TREE_H_
