#include "common/yaml_config.h"

#include <algorithm>
#include <cmath>
#include <map>

#include "absl/strings/escaping.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "common/file.h"
#include "common/yaml_tree.h"

namespace palimpsest {
namespace yaml_config_internal {

constexpr size_t kMaxErrors = 20;

// A setting as it was read: a scalar in YAML syntax, or a map or list of settings.
struct Effective {
  std::string scalar;
  bool is_list = false;
  std::vector<std::pair<std::string, std::unique_ptr<Effective>>> children;

  Effective* Child(absl::string_view key) {
    for (const auto& [name, child] : children) {
      if (name == key) return child.get();
    }
    children.emplace_back(std::string(key), std::make_unique<Effective>());
    return children.back().second.get();
  }
};

struct Document {
  std::string file_name;
  std::unique_ptr<Node> root;
  Effective effective;
  // Stand in for maps that are missing.
  std::vector<std::unique_ptr<Node>> made;
  std::multimap<int, std::string> errors;  // by line
};

namespace {

bool IsPlainScalar(absl::string_view text) {
  return !text.empty() &&
         std::all_of(text.begin(), text.end(),
                     [](unsigned char c) {
                       return absl::ascii_isalnum(c) || c == '_' || c == '.' || c == '/' ||
                              c == '-';
                     }) &&
         text[0] != '-' && text[0] != '.';
}

// A string that reads back as itself. Words that mean something else without quotes get them.
std::string QuotedScalar(absl::string_view text) {
  double number;
  if (IsPlainScalar(text) && text != "null" && text != "true" && text != "false" &&
      !absl::SimpleAtod(text, &number)) {
    return std::string(text);
  }
  std::string out = "\"";
  for (const char c : text) {
    const auto byte = static_cast<unsigned char>(c);
    if (c == '"' || c == '\\') {
      out += '\\';
      out += c;
    } else if (byte < 0x20 || byte == 0x7f) {
      absl::StrAppendFormat(&out, "\\x%02x", byte);
    } else {
      out += c;
    }
  }
  return out + "\"";
}

void Emit(const Effective& setting, const std::string& indent, std::string& out) {
  for (const auto& [name, child] : setting.children) {
    const std::string lead = setting.is_list ? indent + "-" : indent + QuotedScalar(name) + ":";
    if (!child->scalar.empty()) {
      absl::StrAppend(&out, lead, " ", child->scalar, "\n");
    } else if (child->children.empty()) {
      absl::StrAppend(&out, lead, child->is_list ? " []\n" : " {}\n");
    } else {
      absl::StrAppend(&out, lead, "\n");
      Emit(*child, indent + "  ", out);
    }
  }
}

void CollectUnread(const Node& node, Document& document) {
  for (const auto& [name, child] : node.entries) {
    if (!child->read) {
      document.errors.emplace(child->line,
                              absl::StrCat("unknown key '", absl::Utf8SafeCEscape(name), "'"));
    } else {
      CollectUnread(*child, document);
    }
  }
  for (const auto& item : node.items) CollectUnread(*item, document);
}

std::string FormatBytes(Bytes size) {
  const int64_t n = size.count();
  for (const auto& [unit, name] :
       {std::pair<Bytes, const char*>{GiB(1), " GiB"}, {MiB(1), " MiB"}, {KiB(1), " KiB"}}) {
    if (n != 0 && n % unit.count() == 0) return absl::StrCat(n / unit.count(), name);
  }
  return absl::StrCat(n);
}

}  // namespace
}  // namespace yaml_config_internal

using yaml_config_internal::Document;
using yaml_config_internal::Node;

bool ConfigReader::Has(absl::string_view key) const {
  const Node* node = node_->Entry(key);
  return node != nullptr && node->kind != Node::Kind::kNull;
}

void ConfigReader::Report(const Node* node, absl::string_view key, absl::string_view message) {
  document_->errors.emplace(node == nullptr ? node_->line : node->line,
                            absl::StrCat("'", key, "': ", message));
}

void ConfigReader::Error(absl::string_view key, absl::string_view message) {
  Report(node_->Entry(key), key, message);
}

const Node* ConfigReader::Find(absl::string_view key, bool required) {
  const Node* node = node_->Entry(key);
  if (node != nullptr) node->read = true;
  // "key:" with nothing behind it is the same as no key.
  if (node != nullptr && node->kind != Node::Kind::kNull) return node;
  if (required) Report(node, key, "is required and missing");
  return nullptr;
}

const Node* ConfigReader::FindScalar(absl::string_view key, bool required,
                                     absl::string_view expected) {
  const Node* node = Find(key, required);
  if (node == nullptr || node->kind == Node::Kind::kScalar) return node;
  Report(node, key,
         absl::StrCat("expected ", expected, ", got ", yaml_config_internal::KindName(*node)));
  return nullptr;
}

std::string ConfigReader::String(absl::string_view key,
                                 const std::optional<std::string>& fallback) {
  const Node* node = FindScalar(key, !fallback.has_value(), "a string");
  std::string value = node != nullptr ? node->text : fallback.value_or("");
  effective_->Child(key)->scalar = yaml_config_internal::QuotedScalar(value);
  return value;
}

bool ConfigReader::Bool(absl::string_view key, std::optional<bool> fallback) {
  const Node* node = FindScalar(key, !fallback.has_value(), "true or false");
  bool value = fallback.value_or(false);
  if (node != nullptr) {
    const bool valid = !node->quoted && (node->text == "true" || node->text == "false");
    if (!valid) {
      Report(node, key,
             absl::StrCat("expected true or false, got ", yaml_config_internal::KindName(*node)));
    } else {
      value = node->text == "true";
    }
  }
  effective_->Child(key)->scalar = value ? "true" : "false";
  return value;
}

template <typename T, typename Parse, typename Format>
T ConfigReader::Ranged(absl::string_view key, absl::string_view expected, T min, T max,
                       const std::optional<T>& fallback, Parse parse, Format format) {
  const Node* node = FindScalar(key, !fallback.has_value(), expected);
  T value = fallback.value_or(min);
  if (node != nullptr) {
    const std::optional<T> parsed = parse(*node);
    if (!parsed.has_value() || !(*parsed >= min && *parsed <= max)) {
      Report(node, key,
             absl::StrCat("expected ", expected, " from ", format(min), " to ", format(max),
                          ", got ", yaml_config_internal::KindName(*node)));
    } else {
      value = *parsed;
    }
  }
  effective_->Child(key)->scalar = format(value);
  return value;
}

int64_t ConfigReader::Int(absl::string_view key, int64_t min, int64_t max,
                          std::optional<int64_t> fallback) {
  return Ranged<int64_t>(
      key, "a whole number", min, max, fallback,
      [](const Node& node) -> std::optional<int64_t> {
        int64_t value;
        if (node.quoted || !absl::SimpleAtoi(node.text, &value)) return std::nullopt;
        return value;
      },
      [](int64_t value) { return absl::StrCat(value); });
}

double ConfigReader::Double(absl::string_view key, double min, double max,
                            std::optional<double> fallback) {
  return Ranged<double>(
      key, "a number", min, max, fallback,
      [](const Node& node) -> std::optional<double> {
        double value;
        if (node.quoted || !absl::SimpleAtod(node.text, &value)) return std::nullopt;
        return value;
      },
      [](double value) {
        const std::string brief = absl::StrCat(value);
        double back;
        return absl::SimpleAtod(brief, &back) && back == value ? brief
                                                               : absl::StrFormat("%.17g", value);
      });
}

Bytes ConfigReader::Size(absl::string_view key, Bytes min, Bytes max,
                         std::optional<Bytes> fallback) {
  return Ranged<Bytes>(
      key, "a size in bytes (as \"64 MiB\")", min, max, fallback,
      [](const Node& node) -> std::optional<Bytes> {
        absl::StatusOr<Bytes> value = ParseBytes(node.text);
        if (!value.ok()) return std::nullopt;
        return *value;
      },
      yaml_config_internal::FormatBytes);
}

absl::Duration ConfigReader::Duration(absl::string_view key, absl::Duration min, absl::Duration max,
                                      std::optional<absl::Duration> fallback) {
  return Ranged<absl::Duration>(
      key, "a duration (as \"250ms\")", min, max, fallback,
      [](const Node& node) -> std::optional<absl::Duration> {
        absl::Duration value;
        if (!absl::ParseDuration(node.text, &value)) return std::nullopt;
        return value;
      },
      [](absl::Duration value) { return absl::FormatDuration(value); });
}

size_t ConfigReader::ChoiceIndex(absl::string_view key, const std::vector<absl::string_view>& names,
                                 std::optional<size_t> fallback) {
  const Node* node = FindScalar(key, !fallback.has_value(), "a word");
  size_t index = fallback.value_or(0);
  if (node != nullptr) {
    const auto found = std::find(names.begin(), names.end(), node->text);
    if (found == names.end()) {
      Report(node, key,
             absl::StrCat("expected one of ", absl::StrJoin(names, ", "), ", got ",
                          yaml_config_internal::KindName(*node)));
    } else {
      index = static_cast<size_t>(found - names.begin());
    }
  }
  effective_->Child(key)->scalar = yaml_config_internal::QuotedScalar(names[index]);
  return index;
}

std::vector<std::string> ConfigReader::Strings(absl::string_view key, size_t max_items) {
  std::vector<std::string> values;
  Effective* const effective = effective_->Child(key);
  effective->is_list = true;
  const Node* list = Find(key, /*required=*/false);
  if (list == nullptr) return values;
  if (list->kind != Node::Kind::kList || list->items.size() > max_items) {
    Report(list, key, absl::StrCat("expected a list of at most ", max_items, " strings"));
    return values;
  }
  for (const auto& item : list->items) {
    if (item->kind != Node::Kind::kScalar) {
      Report(item.get(), key, "expected a list of strings");
      continue;
    }
    effective->Child(absl::StrCat(values.size()))->scalar =
        yaml_config_internal::QuotedScalar(item->text);
    values.push_back(item->text);
  }
  return values;
}

ConfigReader ConfigReader::Map(absl::string_view key) {
  const Node* node = Find(key, /*required=*/false);
  if (node != nullptr && node->kind != Node::Kind::kMap) {
    Report(node, key, absl::StrCat("expected a map, got ", yaml_config_internal::KindName(*node)));
    node = nullptr;
  }
  if (node == nullptr) {
    document_->made.push_back(std::make_unique<Node>());
    document_->made.back()->kind = Node::Kind::kMap;
    document_->made.back()->line = node_->line;
    node = document_->made.back().get();
  }
  return ConfigReader(document_, node, effective_->Child(key));
}

std::vector<ConfigReader> ConfigReader::Maps(absl::string_view key, size_t max_items) {
  std::vector<ConfigReader> readers;
  Effective* const effective = effective_->Child(key);
  effective->is_list = true;
  const Node* list = Find(key, /*required=*/false);
  if (list == nullptr) return readers;
  if (list->kind != Node::Kind::kList || list->items.size() > max_items) {
    Report(list, key, absl::StrCat("expected a list of at most ", max_items, " maps"));
    return readers;
  }
  for (const auto& item : list->items) {
    if (item->kind != Node::Kind::kMap) {
      Report(item.get(), key, "expected a list of maps");
      continue;
    }
    Effective* const child = effective->Child(absl::StrCat(readers.size()));
    readers.push_back(ConfigReader(document_, item.get(), child));
  }
  return readers;
}

std::vector<std::pair<std::string, ConfigReader>> ConfigReader::NamedMaps(absl::string_view key,
                                                                          size_t max_items) {
  std::vector<std::pair<std::string, ConfigReader>> readers;
  Effective* const effective = effective_->Child(key);
  const Node* map = Find(key, /*required=*/false);
  if (map == nullptr) return readers;
  if (map->kind != Node::Kind::kMap || map->entries.size() > max_items) {
    Report(map, key, absl::StrCat("expected a map of at most ", max_items, " names to maps"));
    return readers;
  }
  ConfigReader inner(document_, map, effective);
  for (const auto& [name, node] : map->entries) readers.emplace_back(name, inner.Map(name));
  return readers;
}

std::vector<std::pair<std::string, std::string>> ConfigReader::NamedStrings(absl::string_view key,
                                                                            size_t max_items) {
  std::vector<std::pair<std::string, std::string>> values;
  Effective* const effective = effective_->Child(key);
  const Node* map = Find(key, /*required=*/false);
  if (map == nullptr) return values;
  if (map->kind != Node::Kind::kMap || map->entries.size() > max_items) {
    Report(map, key, absl::StrCat("expected a map of at most ", max_items, " names to strings"));
    return values;
  }
  ConfigReader inner(document_, map, effective);
  for (const auto& [name, node] : map->entries) values.emplace_back(name, inner.String(name));
  return values;
}

YamlConfig::YamlConfig(std::unique_ptr<Document> document) : document_(std::move(document)) {}
YamlConfig::YamlConfig(YamlConfig&&) noexcept = default;
YamlConfig& YamlConfig::operator=(YamlConfig&&) noexcept = default;
YamlConfig::~YamlConfig() = default;

absl::StatusOr<YamlConfig> YamlConfig::Parse(absl::string_view text, absl::string_view file_name) {
  absl::StatusOr<std::unique_ptr<Node>> root = yaml_config_internal::ParseYamlTree(text, file_name);
  if (!root.ok()) return root.status();
  auto document = std::make_unique<Document>();
  document->file_name = std::string(file_name);
  document->root = *std::move(root);
  return YamlConfig(std::move(document));
}

absl::StatusOr<YamlConfig> YamlConfig::ReadFile(const std::string& path) {
  absl::StatusOr<std::string> text = palimpsest::ReadFile(path, yaml_config_internal::kMaxYamlFile);
  if (!text.ok()) return text.status();
  return Parse(*text, path);
}

ConfigReader YamlConfig::root() {
  return ConfigReader(document_.get(), document_->root.get(), &document_->effective);
}

absl::Status YamlConfig::Finish() {
  yaml_config_internal::CollectUnread(*document_->root, *document_);
  if (document_->errors.empty()) return absl::OkStatus();
  std::vector<std::string> lines;
  for (const auto& [line, message] : document_->errors) {
    if (lines.size() == yaml_config_internal::kMaxErrors) {
      lines.push_back(absl::StrCat("and ", document_->errors.size() - lines.size(), " more"));
      break;
    }
    lines.push_back(absl::StrCat(document_->file_name, ":", line, ": ", message));
  }
  return absl::InvalidArgumentError(absl::StrJoin(lines, "\n"));
}

std::string YamlConfig::EffectiveYaml() const {
  std::string out;
  yaml_config_internal::Emit(document_->effective, "", out);
  return out;
}

}  // namespace palimpsest
