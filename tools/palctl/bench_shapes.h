// Shapes of models that `palctl bench engine` measures with dummy weights, as Hugging Face folders.
#ifndef PALIMPSEST_TOOLS_PALCTL_BENCH_SHAPES_H_
#define PALIMPSEST_TOOLS_PALCTL_BENCH_SHAPES_H_

#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace palimpsest::palctl {

std::vector<std::string> BenchShapes();

// The text of a config.json. InvalidArgument names the known shapes.
absl::StatusOr<std::string> BenchShapeConfig(absl::string_view shape);

// Writes config.json and a tokenizer of one token, which is enough where tokens are numbers.
absl::Status WriteBenchModel(const std::string& folder, absl::string_view config);

}  // namespace palimpsest::palctl

#endif  // PALIMPSEST_TOOLS_PALCTL_BENCH_SHAPES_H_
