#include "common/yaml_tree.h"

#include <yaml-cpp/eventhandler.h>
#include <yaml-cpp/exceptions.h>
#include <yaml-cpp/parser.h>

#include <sstream>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"

namespace palimpsest::yaml_config_internal {
namespace {

constexpr size_t kMaxDepth = 16;
constexpr size_t kMaxNodes = 20'000;

class SyntaxError : public YAML::Exception {
 public:
  using YAML::Exception::Exception;
};

// Builds the tree from parser events and stops at what is not accepted.
class TreeBuilder : public YAML::EventHandler {
 public:
  std::unique_ptr<Node> Take() { return std::move(root_); }

  void OnDocumentStart(const YAML::Mark&) override {}
  void OnDocumentEnd() override {}
  void OnNull(const YAML::Mark& mark, YAML::anchor_t anchor) override {
    Add(mark, "", anchor, Node::Kind::kNull);
  }
  void OnAlias(const YAML::Mark& mark, YAML::anchor_t) override { Refuse(mark, "an alias"); }
  void OnScalar(const YAML::Mark& mark, const std::string& tag, YAML::anchor_t anchor,
                const std::string& value) override {
    const bool quoted = tag == "!";
    // yaml-cpp calls "~" and "null" scalars.
    const bool null = !quoted && (value == "~" || value == "null");
    if (awaiting_key()) {
      CheckPlain(mark, tag, anchor);
      if (open_.back()->Entry(value) != nullptr) {
        Refuse(mark, absl::StrCat("a second '", value, "'"));
      }
      Count(mark);
      open_.back()->entries.emplace_back(value, nullptr);
      return;
    }
    Node* node = Add(mark, tag, anchor, null ? Node::Kind::kNull : Node::Kind::kScalar);
    node->text = value;
    node->quoted = quoted;
  }
  void OnSequenceStart(const YAML::Mark& mark, const std::string& tag, YAML::anchor_t anchor,
                       YAML::EmitterStyle::value) override {
    Open(mark, Add(mark, tag, anchor, Node::Kind::kList));
  }
  void OnSequenceEnd() override { open_.pop_back(); }
  void OnMapStart(const YAML::Mark& mark, const std::string& tag, YAML::anchor_t anchor,
                  YAML::EmitterStyle::value) override {
    Open(mark, Add(mark, tag, anchor, Node::Kind::kMap));
  }
  void OnMapEnd() override { open_.pop_back(); }

 private:
  [[noreturn]] static void Refuse(const YAML::Mark& mark, absl::string_view what) {
    throw SyntaxError(mark, absl::StrCat("found ", what, ", which is not allowed here"));
  }

  static void CheckPlain(const YAML::Mark& mark, const std::string& tag, YAML::anchor_t anchor) {
    if (anchor != 0) Refuse(mark, "an anchor");
    if (!tag.empty() && tag != "?" && tag != "!") Refuse(mark, "a tag");
  }

  void Count(const YAML::Mark& mark) {
    if (++count_ > kMaxNodes) Refuse(mark, absl::StrCat("more than ", kMaxNodes, " values"));
  }

  // Whether the innermost open node is a map whose next scalar is a key.
  bool awaiting_key() const {
    if (open_.empty() || open_.back()->kind != Node::Kind::kMap) return false;
    return open_.back()->entries.empty() || open_.back()->entries.back().second != nullptr;
  }

  Node* Add(const YAML::Mark& mark, const std::string& tag, YAML::anchor_t anchor,
            Node::Kind kind) {
    CheckPlain(mark, tag, anchor);
    Count(mark);
    if (awaiting_key()) Refuse(mark, "a key that is not a string");
    auto node = std::make_unique<Node>();
    Node* const added = node.get();
    node->kind = kind;
    node->line = mark.line + 1;
    if (open_.empty()) {
      root_ = std::move(node);
    } else if (open_.back()->kind == Node::Kind::kMap) {
      open_.back()->entries.back().second = std::move(node);
    } else {
      open_.back()->items.push_back(std::move(node));
    }
    return added;
  }

  void Open(const YAML::Mark& mark, Node* node) {
    if (open_.size() == kMaxDepth) Refuse(mark, absl::StrCat("more than ", kMaxDepth, " levels"));
    open_.push_back(node);
  }

  std::unique_ptr<Node> root_;
  std::vector<Node*> open_;
  size_t count_ = 0;
};

}  // namespace

absl::StatusOr<std::unique_ptr<Node>> ParseYamlTree(absl::string_view text,
                                                    absl::string_view file_name) {
  if (text.size() > static_cast<size_t>(kMaxYamlFile.count())) {
    return absl::InvalidArgumentError(absl::StrCat(
        file_name, ": longer than the ", kMaxYamlFile.ToString(), " allowed for a configuration"));
  }
  std::unique_ptr<Node> root;
  try {
    std::istringstream in{std::string(text)};
    YAML::Parser parser(in);
    TreeBuilder builder;
    parser.HandleNextDocument(builder);
    root = builder.Take();
    if (TreeBuilder rest; parser.HandleNextDocument(rest)) {
      return absl::InvalidArgumentError(
          absl::StrCat(file_name, ": a second YAML document ('---') is not allowed"));
    }
  } catch (const YAML::Exception& error) {
    return absl::InvalidArgumentError(
        absl::StrCat(file_name, ":", error.mark.line + 1, ": ", error.msg));
  }
  if (root == nullptr || root->kind == Node::Kind::kNull) {
    root = std::make_unique<Node>();
    root->kind = Node::Kind::kMap;
  }
  if (root->kind != Node::Kind::kMap) {
    return absl::InvalidArgumentError(absl::StrCat(
        file_name, ":", root->line, ": expected 'key: value' lines, got ", KindName(*root)));
  }
  return root;
}

std::string KindName(const Node& node) {
  switch (node.kind) {
    case Node::Kind::kNull:
      return "nothing";
    case Node::Kind::kList:
      return "a list";
    case Node::Kind::kMap:
      return "a map";
    case Node::Kind::kScalar:
      break;
  }
  constexpr size_t kShown = 60;
  const bool cut = node.text.size() > kShown;
  return absl::StrCat(node.quoted ? "the string '" : "'",
                      absl::Utf8SafeCEscape(node.text.substr(0, kShown)), cut ? "...'" : "'");
}

}  // namespace palimpsest::yaml_config_internal
