// Requests for the tests of nodes, and what becomes of them.
#ifndef PALIMPSEST_TESTS_NODE_STORIES_H_
#define PALIMPSEST_TESTS_NODE_STORIES_H_

#include <gtest/gtest.h>

#include <atomic>
#include <future>
#include <map>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "tests/node.h"

namespace palimpsest {

inline Node::Request Story(const std::string& tenant, int number, int max_tokens) {
  return {.tenant = tenant,
          .text = absl::StrCat("Story ", number, " of ", tenant, ": once upon a time"),
          .max_tokens = max_tokens};
}

inline std::vector<Generation> OneByOne(Node& node, const std::vector<Node::Request>& requests) {
  std::vector<Generation> results;
  for (const Node::Request& request : requests) results.push_back(node.Generate(request));
  return results;
}

// What a node without pressure answers, one request after another. Every node of a back-end answers
// alike, so each is asked for once.
inline std::vector<Generation> Calm(Node& node, const std::vector<Node::Request>& requests) {
  using Key = std::tuple<NodeBackend, std::string, std::string, int, float, uint64_t>;
  static auto& answers = *new std::map<Key, Generation>;
  std::vector<Generation> results;
  for (const Node::Request& request : requests) {
    const auto [answer, first] =
        answers.try_emplace(Key(node.backend(), request.tenant, request.text, request.max_tokens,
                                request.temperature, request.seed));
    if (first) answer->second = node.Generate(request);
    results.push_back(answer->second);
  }
  return results;
}

inline std::vector<Generation> AllAtOnce(Node& node, const std::vector<Node::Request>& requests) {
  std::vector<std::future<Generation>> running;
  for (const Node::Request& request : requests) running.push_back(node.GenerateAsync(request));
  std::vector<Generation> results;
  for (std::future<Generation>& result : running) results.push_back(result.get());
  return results;
}

// All requests at once, again and again: a fast machine has answered them before the broker may do
// what a test waits for, such as taking parameters that were restored less than min_residence ago.
class SteadyPressure {
 public:
  SteadyPressure(Node& node, std::vector<Node::Request> requests)
      : answers_(std::async(std::launch::async, [this, &node, requests = std::move(requests)] {
          std::vector<Generation> answers;
          do {
            answers = AllAtOnce(node, requests);
          } while (!enough_);
          return answers;
        })) {}
  ~SteadyPressure() { Finish(); }

  // The round that runs is the last one.
  void Finish() { enough_ = true; }
  // What the last round answered; once.
  std::vector<Generation> Answers() {
    Finish();
    return answers_.get();
  }

 private:
  std::atomic<bool> enough_ = false;
  std::future<std::vector<Generation>> answers_;
};

inline void ExpectSameTokens(const Node& node, const std::vector<Node::Request>& requests,
                             const std::vector<Generation>& expected,
                             const std::vector<Generation>& got) {
  ASSERT_EQ(expected.size(), got.size());
  for (size_t i = 0; i < expected.size(); ++i) {
    EXPECT_TRUE(got[i].status.ok()) << got[i].status;
    EXPECT_TRUE(
        SameTokens(node.backend(), expected[i], got[i], /*greedy=*/requests[i].temperature == 0))
        << "request " << i;
  }
}

inline std::vector<Node::Request> Pressure(int count, int max_tokens) {
  std::vector<Node::Request> requests;
  for (int i = 0; i < count; ++i) requests.push_back(Story("beta", i, max_tokens));
  return requests;
}

}  // namespace palimpsest

#endif  // PALIMPSEST_TESTS_NODE_STORIES_H_
