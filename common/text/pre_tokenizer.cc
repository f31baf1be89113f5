#include "common/text/pre_tokenizer.h"

#include <optional>
#include <string>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "common/text/json_fields.h"
#include "nlohmann/json.hpp"

namespace palimpsest {

using nlohmann::json;

namespace {

constexpr int kMaxDepth = 4;
constexpr size_t kMaxSteps = 16;

// GPT-2's published pattern, which ByteLevel with use_regex stands for.
constexpr absl::string_view kByteLevelPattern =
    R"('s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+)";

constexpr absl::string_view kWhere = "pre_tokenizer";

}  // namespace

absl::StatusOr<PreTokenizer> PreTokenizer::FromJson(const json& json) {
  PreTokenizer result;
  if (const absl::Status status = result.AddSteps(json, 0); !status.ok()) return status;
  if (!result.byte_level_) {
    return absl::UnimplementedError(
        "pre_tokenizer has no ByteLevel step; only byte-level BPE is supported");
  }
  return result;
}

absl::Status PreTokenizer::AddSteps(const json& json, int depth) {
  const auto type = RequireString(json, "type", kWhere);
  if (!type.ok()) return type.status();
  if (depth > kMaxDepth || steps_.size() >= kMaxSteps) {
    return absl::InvalidArgumentError(absl::StrCat("pre_tokenizer has more than ", kMaxSteps,
                                                   " steps or is nested deeper than ", kMaxDepth));
  }
  if (byte_level_) {
    return absl::UnimplementedError(
        "pre_tokenizer has a step behind ByteLevel; only ByteLevel as the last step is supported");
  }
  if (*type == "Split") return AddSplit(json);
  if (*type == "Digits") return AddDigits(json);
  if (*type == "ByteLevel") return AddByteLevel(json);
  if (*type != "Sequence") {
    return absl::UnimplementedError(
        absl::StrCat("pre_tokenizer of type \"", *type,
                     "\" is not supported (Split, Digits, ByteLevel and Sequence are)"));
  }
  const auto members = RequireMember(json, "pretokenizers", "pre_tokenizer Sequence");
  if (!members.ok()) return members.status();
  if (!(*members)->is_array()) {
    return absl::InvalidArgumentError("\"pretokenizers\" of pre_tokenizer Sequence must be a list");
  }
  for (const auto& member : **members) {
    if (const absl::Status status = AddSteps(member, depth + 1); !status.ok()) return status;
  }
  return absl::OkStatus();
}

absl::Status PreTokenizer::AddSplit(const json& json) {
  const auto pattern = RequireMember(json, "pattern", "pre_tokenizer Split");
  if (!pattern.ok()) return pattern.status();
  const bool literal = FindMember(**pattern, "String") != nullptr;
  const auto text =
      RequireString(**pattern, literal ? "String" : "Regex", "pattern of pre_tokenizer Split");
  if (!text.ok()) return text.status();
  const auto behavior = RequireString(json, "behavior", "pre_tokenizer Split");
  if (!behavior.ok()) return behavior.status();
  if (*behavior != "Isolated" && *behavior != "Removed") {
    return absl::UnimplementedError(
        absl::StrCat("behavior \"", *behavior,
                     "\" of pre_tokenizer Split is not supported (Isolated and Removed are)"));
  }
  const auto invert = BoolOr(json, "invert", false, "pre_tokenizer Split");
  if (!invert.ok()) return invert.status();
  auto regex = Regex::Compile(literal ? Regex::Quote(*text) : *text);
  if (!regex.ok()) return regex.status();
  steps_.push_back({.pattern = *regex, .invert = *invert, .remove = *behavior == "Removed"});
  return absl::OkStatus();
}

absl::Status PreTokenizer::AddDigits(const json& json) {
  const auto individual = BoolOr(json, "individual_digits", false, "pre_tokenizer Digits");
  if (!individual.ok()) return individual.status();
  auto regex = Regex::Compile(*individual ? "\\p{N}" : "\\p{N}+");
  if (!regex.ok()) return regex.status();
  steps_.push_back({.pattern = *regex});
  return absl::OkStatus();
}

absl::Status PreTokenizer::AddByteLevel(const json& json) {
  byte_level_ = true;
  const auto prefix = BoolOr(json, "add_prefix_space", true, "pre_tokenizer ByteLevel");
  if (!prefix.ok()) return prefix.status();
  const auto use_regex = BoolOr(json, "use_regex", true, "pre_tokenizer ByteLevel");
  if (!use_regex.ok()) return use_regex.status();
  Step step{.add_prefix_space = *prefix};
  if (*use_regex) {
    auto regex = Regex::Compile(kByteLevelPattern);
    if (!regex.ok()) return regex.status();
    step.pattern = *regex;
  }
  steps_.push_back(std::move(step));
  return absl::OkStatus();
}

// Pushes a text through all steps, depth first, so that no list of words is ever built.
class PreTokenizer::Run {
 public:
  Run(const PreTokenizer& rules, absl::FunctionRef<void(absl::string_view)> word)
      : steps_(rules.steps_), word_(word) {
    for (const Step& step : steps_) {
      scratch_.push_back(step.pattern ? std::optional<Regex::Scratch>(*step.pattern)
                                      : std::nullopt);
    }
  }

  absl::Status From(size_t index, absl::string_view text) {
    if (text.empty()) return absl::OkStatus();
    if (index == steps_.size()) {
      word_(text);
      return absl::OkStatus();
    }
    const Step& step = steps_[index];
    if (step.add_prefix_space && !absl::StartsWith(text, " ")) {
      return Cut(index, absl::StrCat(" ", text));
    }
    return Cut(index, text);
  }

 private:
  absl::Status Cut(size_t index, absl::string_view text) {
    const Step& step = steps_[index];
    if (!step.pattern) return From(index + 1, text);
    const bool keep_matches = !step.remove || step.invert;
    const bool keep_rest = !step.remove || !step.invert;
    size_t pos = 0;
    while (pos < text.size()) {
      const auto match = step.pattern->Find(text, pos, *scratch_[index]);
      if (!match.ok()) return match.status();
      const size_t begin = match->has_value() ? (*match)->begin : text.size();
      const size_t end = match->has_value() ? (*match)->end : text.size();
      if (keep_rest) {
        const absl::Status status = From(index + 1, text.substr(pos, begin - pos));
        if (!status.ok()) return status;
      }
      if (keep_matches) {
        const absl::Status status = From(index + 1, text.substr(begin, end - begin));
        if (!status.ok()) return status;
      }
      pos = end;
    }
    return absl::OkStatus();
  }

  const std::vector<Step>& steps_;
  absl::FunctionRef<void(absl::string_view)> word_;
  std::vector<std::optional<Regex::Scratch>> scratch_;
};

absl::Status PreTokenizer::Split(absl::string_view text,
                                 absl::FunctionRef<void(absl::string_view)> word) const {
  return Run(*this, word).From(0, text);
}

}  // namespace palimpsest
