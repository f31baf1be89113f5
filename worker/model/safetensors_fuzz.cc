// A whole .safetensors file, or (when it begins with a brace) an index: what is accepted keeps its
// promises.
#include <sys/mman.h>
#include <unistd.h>

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <map>

#include "absl/strings/string_view.h"
#include "common/fd.h"
#include "worker/model/safetensors.h"

namespace {

using palimpsest::Bytes;

void CheckIndex(absl::string_view text) {
  const auto files = palimpsest::ParseSafetensorsIndex(text);
  if (!files.ok()) return;
  for (const auto& [name, file] : *files) {
    if (file.find('/') != std::string::npos || file.find('\0') != std::string::npos) std::abort();
  }
}

void CheckFile(const uint8_t* data, size_t size) {
  const palimpsest::UniqueFd fd(memfd_create("fuzz", MFD_CLOEXEC));
  if (write(fd.get(), data, size) != static_cast<ssize_t>(size)) std::abort();
  const auto tensors =
      palimpsest::ReadSafetensorsHeader(fd.get(), Bytes(static_cast<int64_t>(size)));
  if (!tensors.ok()) return;
  std::map<Bytes, Bytes> ranges;
  for (const auto& [name, tensor] : *tensors) {
    int64_t elements = 1;
    for (const int64_t n : tensor.shape) elements *= n;
    if (elements != tensor.elements || tensor.size < Bytes(elements)) std::abort();
    if (tensor.size > Bytes(0) && !ranges.emplace(tensor.offset, tensor.size).second) std::abort();
  }
  Bytes end(static_cast<int64_t>(size));
  for (auto range = ranges.rbegin(); range != ranges.rend(); ++range) {
    if (range->first + range->second != end) std::abort();
    end = range->first;
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size > 0 && data[0] == '{') {
    CheckIndex(absl::string_view(reinterpret_cast<const char*>(data), size));
  } else {
    CheckFile(data, size);
  }
  return 0;
}
