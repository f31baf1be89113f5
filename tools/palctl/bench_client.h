// A worker as its router sees it: token ids in, token ids out, many requests at once. For
// measurements.
//
// Threads: one at a time; the calls block.
#ifndef PALIMPSEST_TOOLS_PALCTL_BENCH_CLIENT_H_
#define PALIMPSEST_TOOLS_PALCTL_BENCH_CLIENT_H_

#include <cstdint>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "proto/palimpsest/v1/worker.grpc.pb.h"

namespace palimpsest::palctl {

class BenchClient {
 public:
  struct Answer {
    absl::Duration first_token;  // of the first request
    absl::Duration all;          // to the end of the last one
  };

  // To one request.
  struct Reply {
    absl::Duration first_token;
    std::vector<int32_t> tokens;
    int64_t cached_tokens = 0;  // of the prompt, whose KV was there or was loaded
  };

  // Prompts are random ids of 0 .. vocabulary - 1. `token` is the worker's router token.
  BenchClient(const std::string& address, std::string token, int32_t vocabulary);

  // Greedy answers of exactly `tokens` tokens to `batch` random prompts, asked at once.
  absl::StatusOr<Answer> Ask(int32_t batch, int32_t prompt_tokens, int32_t tokens);

  // The greedy answer of exactly `tokens` tokens to this prompt.
  absl::StatusOr<Reply> AskPrompt(const std::vector<int32_t>& prompt, int32_t tokens);

  // Random ids of 0 .. vocabulary - 1, others each time.
  std::vector<int32_t> RandomPrompt(int32_t tokens);

  absl::StatusOr<v1::WorkerStats> Stats(absl::Duration timeout = absl::Seconds(10));

 private:
  class Call;

  v1::WorkerGenerateRequest Request(const std::vector<int32_t>& prompt, int32_t tokens);

  const std::string token_;
  const int32_t vocabulary_;
  std::unique_ptr<v1::Worker::Stub> stub_;
  std::minstd_rand random_;
  int64_t requests_ = 0;
};

}  // namespace palimpsest::palctl

#endif  // PALIMPSEST_TOOLS_PALCTL_BENCH_CLIENT_H_
