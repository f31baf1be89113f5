#include "worker/model/safetensors.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cassert>
#include <cstring>
#include <limits>
#include <nlohmann/json.hpp>
#include <optional>
#include <utility>

#include "absl/container/flat_hash_map.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "common/json_text.h"
#include "worker/model/float16.h"

namespace palimpsest {
namespace {

using nlohmann::json;

static_assert(std::endian::native == std::endian::little, "safetensors are little-endian");

constexpr uint64_t kMaxHeader = uint64_t{16} << 20;
constexpr uint64_t kMaxIndex = uint64_t{64} << 20;
constexpr size_t kMaxDimensions = 8;
constexpr size_t kMaxShards = 512;
constexpr size_t kLengthBytes = 8;
constexpr absl::string_view kSingleFile = "model.safetensors";
constexpr absl::string_view kIndexFile = "model.safetensors.index.json";
constexpr absl::string_view kMetadata = "__metadata__";

std::optional<int64_t> ElementBytes(absl::string_view dtype) {
  static const auto* const kBytes = new absl::flat_hash_map<absl::string_view, int64_t>{
      {"BOOL", 1}, {"U8", 1},  {"I8", 1},  {"F8_E5M2", 1}, {"F8_E4M3", 1},
      {"U16", 2},  {"I16", 2}, {"F16", 2}, {"BF16", 2},    {"U32", 4},
      {"I32", 4},  {"F32", 4}, {"U64", 8}, {"I64", 8},     {"F64", 8}};
  const auto it = kBytes->find(dtype);
  if (it == kBytes->end()) return std::nullopt;
  return it->second;
}

std::optional<int64_t> NonNegative(const json& value) {
  if (!value.is_number_unsigned()) return std::nullopt;
  const uint64_t number = value.get<uint64_t>();
  if (number > std::numeric_limits<int64_t>::max()) return std::nullopt;
  return static_cast<int64_t>(number);
}

absl::Status TensorError(absl::string_view name, absl::string_view problem) {
  return absl::InvalidArgumentError(
      absl::StrCat("tensor \"", name.substr(0, 200), "\": ", problem));
}

absl::Status ReadShape(const std::string& name, const json& shape, TensorInfo& tensor) {
  if (!shape.is_array() || shape.size() > kMaxDimensions) {
    return TensorError(
        name, absl::StrCat("shape: expected a list of at most ", kMaxDimensions, " sizes"));
  }
  tensor.elements = 1;
  for (const json& value : shape) {
    const std::optional<int64_t> size = NonNegative(value);
    if (!size.has_value()) {
      return TensorError(name, "shape: expected whole numbers of at least 0");
    }
    if (__builtin_mul_overflow(tensor.elements, *size, &tensor.elements)) {
      return TensorError(name, "shape: the product of its sizes overflows");
    }
    tensor.shape.push_back(*size);
  }
  return absl::OkStatus();
}

absl::StatusOr<TensorInfo> ReadTensor(const std::string& name, const json& entry, Bytes data_size) {
  if (name.empty()) return TensorError(name, "expected a name");
  if (!entry.is_object() || entry.size() != 3 || !entry.contains("dtype") ||
      !entry.contains("shape") || !entry.contains("data_offsets")) {
    return TensorError(name, "expected exactly the keys dtype, shape and data_offsets");
  }
  TensorInfo tensor;
  const json& dtype = entry["dtype"];
  tensor.dtype = dtype.is_string() ? dtype.get<std::string>() : dtype.dump();
  const std::optional<int64_t> width = ElementBytes(tensor.dtype);
  if (!dtype.is_string() || !width.has_value()) {
    return TensorError(name, absl::StrCat("unknown dtype ", tensor.dtype.substr(0, 40)));
  }
  if (absl::Status status = ReadShape(name, entry["shape"], tensor); !status.ok()) return status;
  const json& offsets = entry["data_offsets"];
  if (!offsets.is_array() || offsets.size() != 2 || !NonNegative(offsets[0]) ||
      !NonNegative(offsets[1])) {
    return TensorError(name, "data_offsets: expected [begin, end]");
  }
  const int64_t begin = *NonNegative(offsets[0]);
  const int64_t end = *NonNegative(offsets[1]);
  if (begin > end || end > data_size.count()) {
    return TensorError(name, absl::StrCat("data_offsets [", begin, ", ", end, "] reach beyond the ",
                                          data_size.count(), " bytes of data in the file"));
  }
  int64_t expected = 0;
  if (__builtin_mul_overflow(tensor.elements, *width, &expected) || expected != end - begin) {
    return TensorError(
        name, absl::StrCat("data_offsets hold ", end - begin, " bytes, but ", tensor.elements,
                           " elements of ", tensor.dtype, " need ", expected));
  }
  tensor.offset = Bytes(begin);
  tensor.size = Bytes(end - begin);
  return tensor;
}

absl::Status CheckMetadata(const json& metadata) {
  const bool strings =
      metadata.is_object() && std::all_of(metadata.begin(), metadata.end(),
                                          [](const json& value) { return value.is_string(); });
  if (strings) return absl::OkStatus();
  return absl::InvalidArgumentError("__metadata__: expected an object of strings");
}

// Every byte of the data belongs to exactly one tensor.
absl::Status CheckCoverage(const TensorMap& tensors, Bytes data_size) {
  std::vector<TensorMap::const_pointer> order;
  for (const auto& entry : tensors) order.push_back(&entry);
  std::sort(order.begin(), order.end(), [](const auto* a, const auto* b) {
    return std::pair(a->second.offset, a->second.size) <
           std::pair(b->second.offset, b->second.size);
  });
  Bytes covered;
  for (const auto* entry : order) {
    if (entry->second.offset != covered) {
      return TensorError(entry->first,
                         absl::StrCat(entry->second.offset < covered ? "overlaps" : "leaves a hole",
                                      ": begins at byte ", entry->second.offset.count(),
                                      ", expected ", covered.count()));
    }
    covered += entry->second.size;
  }
  if (covered == data_size) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("tensors hold ", covered.count(), " of ", data_size.count(), " bytes of data"));
}

bool IsPlainFileName(absl::string_view name) {
  return name.size() <= 255 && absl::EndsWith(name, ".safetensors") && name.front() != '.' &&
         std::all_of(name.begin(), name.end(), [](char c) { return c != '/' && c >= ' '; });
}

absl::Status FileError(const std::string& path, const absl::Status& status) {
  return absl::Status(status.code(), absl::StrCat(path, ": ", status.message()));
}

absl::Status PreadAll(int fd, void* out, size_t size, int64_t offset) {
  auto* to = static_cast<char*>(out);
  while (size > 0) {
    const ssize_t got = ::pread(fd, to, size, offset);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) return ErrnoStatus("cannot read");
    if (got == 0) {
      return absl::DataLossError(
          absl::StrCat("the file ends at byte ", offset, ", expected ", size, " bytes more"));
    }
    to += got;
    size -= static_cast<size_t>(got);
    offset += got;
  }
  return absl::OkStatus();
}

absl::StatusOr<UniqueFd> OpenRegular(const std::string& path, Bytes& size) {
  UniqueFd fd(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
  if (!fd.valid()) return ErrnoStatus(absl::StrCat(path, ": cannot open"));
  struct stat info;
  if (::fstat(fd.get(), &info) != 0) return ErrnoStatus(absl::StrCat(path, ": cannot stat"));
  if (!S_ISREG(info.st_mode)) {
    return absl::InvalidArgumentError(absl::StrCat(path, ": expected a regular file"));
  }
  size = Bytes(info.st_size);
  return fd;
}

}  // namespace

absl::StatusOr<TensorMap> ParseSafetensorsHeader(absl::string_view text, Bytes data_size) {
  auto document = ParseJson(text, {.max_bytes = kMaxHeader, .max_depth = 3});
  if (!document.ok()) return document.status();
  if (!document->is_object()) return absl::InvalidArgumentError("header: expected a JSON object");
  TensorMap tensors;
  for (const auto& [name, entry] : document->items()) {
    if (name == kMetadata) {
      if (absl::Status status = CheckMetadata(entry); !status.ok()) return status;
      continue;
    }
    auto tensor = ReadTensor(name, entry, data_size);
    if (!tensor.ok()) return tensor.status();
    tensors.emplace(name, *std::move(tensor));
  }
  if (absl::Status status = CheckCoverage(tensors, data_size); !status.ok()) return status;
  return tensors;
}

absl::StatusOr<TensorMap> ReadSafetensorsHeader(int fd, Bytes file_size) {
  uint64_t length = 0;
  if (absl::Status status = PreadAll(fd, &length, kLengthBytes, 0); !status.ok()) return status;
  const uint64_t rest = static_cast<uint64_t>(file_size.count()) - kLengthBytes;
  if (length > rest || length > kMaxHeader) {
    return absl::InvalidArgumentError(absl::StrCat(
        "header of ", length, " bytes, expected at most ", std::min(rest, kMaxHeader)));
  }
  std::string text(length, '\0');
  if (absl::Status status = PreadAll(fd, text.data(), length, kLengthBytes); !status.ok()) {
    return status;
  }
  auto tensors = ParseSafetensorsHeader(text, Bytes(static_cast<int64_t>(rest - length)));
  if (!tensors.ok()) return tensors;
  for (auto& [name, tensor] : *tensors) {
    tensor.offset += Bytes(static_cast<int64_t>(kLengthBytes + length));
  }
  return tensors;
}

absl::StatusOr<absl::btree_map<std::string, std::string>> ParseSafetensorsIndex(
    absl::string_view text) {
  auto document = ParseJson(text, {.max_bytes = kMaxIndex, .max_depth = 8});
  if (!document.ok()) return document.status();
  if (!document->is_object() || !document->contains("weight_map") ||
      !(*document)["weight_map"].is_object()) {
    return absl::InvalidArgumentError("expected an object with a \"weight_map\" object");
  }
  absl::btree_map<std::string, std::string> files;
  for (const auto& [name, file] : (*document)["weight_map"].items()) {
    if (!file.is_string() || !IsPlainFileName(file.get_ref<const std::string&>())) {
      return TensorError(name,
                         absl::StrCat("weight_map: expected the name of a .safetensors file of "
                                      "the same folder, got ",
                                      file.dump().substr(0, 80)));
    }
    files.emplace(name, file.get<std::string>());
  }
  return files;
}

absl::Status Checkpoint::AddFile(const std::string& path, TensorMap& tensors) {
  Bytes size;
  auto fd = OpenRegular(path, size);
  if (!fd.ok()) return fd.status();
  auto header = ReadSafetensorsHeader(fd->get(), size);
  if (!header.ok()) return FileError(path, header.status());
  tensors = *std::move(header);
  for (auto& [name, tensor] : tensors) tensor.file = static_cast<int32_t>(files_.size());
  files_.push_back({.path = path, .fd = *std::move(fd)});
  return absl::OkStatus();
}

absl::Status Checkpoint::AddShards(const std::string& folder,
                                   const absl::btree_map<std::string, std::string>& weight_map) {
  absl::btree_map<std::string, TensorMap> shards;
  for (const auto& [name, file] : weight_map) shards[file];
  if (shards.size() > kMaxShards) {
    return absl::InvalidArgumentError(
        absl::StrCat(shards.size(), " shards, expected at most ", kMaxShards));
  }
  for (auto& [file, tensors] : shards) {
    const std::string path = absl::StrCat(folder, "/", file);
    if (absl::Status status = AddFile(path, tensors); !status.ok()) return status;
    for (auto& [name, tensor] : tensors) {
      const auto listed = weight_map.find(name);
      if (listed == weight_map.end() || listed->second != file) {
        return FileError(path, TensorError(name, "the index does not list it for this file"));
      }
      tensors_.emplace(name, tensor);
    }
  }
  for (const auto& [name, file] : weight_map) {
    if (!tensors_.contains(name)) {
      return FileError(absl::StrCat(folder, "/", file),
                       TensorError(name, "the index lists it for this file, which lacks it"));
    }
  }
  return absl::OkStatus();
}

absl::StatusOr<Checkpoint> Checkpoint::Open(const std::string& folder) {
  Checkpoint checkpoint;
  absl::Status single =
      checkpoint.AddFile(absl::StrCat(folder, "/", kSingleFile), checkpoint.tensors_);
  if (single.ok()) return checkpoint;
  if (!absl::IsNotFound(single)) return single;

  const std::string index_path = absl::StrCat(folder, "/", kIndexFile);
  Bytes size;
  auto fd = OpenRegular(index_path, size);
  if (absl::IsNotFound(fd.status())) {
    return absl::NotFoundError(
        absl::StrCat(folder, ": expected ", kSingleFile, " or ", kIndexFile, ", found neither"));
  }
  if (!fd.ok()) return fd.status();
  if (size > Bytes(kMaxIndex)) {
    return absl::InvalidArgumentError(
        absl::StrCat(index_path, ": expected at most ", kMaxIndex, " bytes"));
  }
  std::string text(static_cast<size_t>(size.count()), '\0');
  if (absl::Status status = PreadAll(fd->get(), text.data(), text.size(), 0); !status.ok()) {
    return FileError(index_path, status);
  }
  auto weight_map = ParseSafetensorsIndex(text);
  if (!weight_map.ok()) return FileError(index_path, weight_map.status());
  if (absl::Status status = checkpoint.AddShards(folder, *weight_map); !status.ok()) return status;
  return checkpoint;
}

absl::Status Checkpoint::ReadRaw(const TensorInfo& tensor, int64_t first, int64_t count,
                                 int64_t width, void* out) const {
  assert(first >= 0 && count >= 0 && first + count <= tensor.elements);
  const File& file = files_[static_cast<size_t>(tensor.file)];
  const absl::Status status = PreadAll(file.fd.get(), out, static_cast<size_t>(count * width),
                                       tensor.offset.count() + first * width);
  return status.ok() ? status : FileError(file.path, status);
}

absl::Status Checkpoint::ReadBf16(const TensorInfo& tensor, int64_t first,
                                  absl::Span<uint16_t> out) const {
  const auto count = static_cast<int64_t>(out.size());
  if (tensor.dtype == "BF16") return ReadRaw(tensor, first, count, 2, out.data());
  std::vector<float> floats(out.size());
  if (absl::Status status = ReadFloats(tensor, first, absl::MakeSpan(floats)); !status.ok()) {
    return status;
  }
  std::transform(floats.begin(), floats.end(), out.begin(),
                 [](float value) { return Bf16FromFloat(value); });
  return absl::OkStatus();
}

absl::Status Checkpoint::ReadFloats(const TensorInfo& tensor, int64_t first,
                                    absl::Span<float> out) const {
  const auto count = static_cast<int64_t>(out.size());
  if (tensor.dtype == "F32") return ReadRaw(tensor, first, count, 4, out.data());
  if (tensor.dtype != "BF16" && tensor.dtype != "F16") {
    return absl::InvalidArgumentError(
        absl::StrCat("expected a tensor of BF16, F16 or F32, got ", tensor.dtype));
  }
  std::vector<uint16_t> bits(out.size());
  if (absl::Status status = ReadRaw(tensor, first, count, 2, bits.data()); !status.ok()) {
    return status;
  }
  if (tensor.dtype == "F16") {
    std::transform(bits.begin(), bits.end(), out.begin(),
                   [](uint16_t value) { return FloatFromF16(value); });
  } else {
    std::transform(bits.begin(), bits.end(), out.begin(),
                   [](uint16_t value) { return FloatFromBf16(value); });
  }
  return absl::OkStatus();
}

}  // namespace palimpsest
